"""Rows and cuts of a stored pool as text, and back: the part of it that needs no database.

An agent turns its own rows into text and reads a cut's text by itself, also where the database is
behind an actor on another machine (runtime/ray_pool.py): so that work is not done in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hacrl.errors import UserError
from hacrl.garbage import no_garbage
from hacrl.store.pool import Key, as_snapshot, other_content
from hacrl.store.pool.wire import Wire, WireError, from_json, to_json
from hacrl.types import SCHEMA, STORED, Snapshot, Trajectory

Bodies = dict[Key, str]
Row = tuple[int, str, str, int, str]
"""A key and its body."""

Packed = tuple[list[Key], bytes]
"""Rows on their way between processes: their keys, and their bodies line by line."""

OUTSIDE = "It was changed outside hacrl: put the stored file back, or start the run anew"


@dataclass(frozen=True)
class CutRecord:
    """What is stored of a closed step.

    Example: {"step": 3, "members": ["ant"], "rows": {"ant": {"q1": [0, 1]}}, "schema": 1}
    """

    __pydantic_config__ = STORED

    step: int
    members: tuple[str, ...]
    rows: dict[str, dict[str, tuple[int, ...]]]
    """Agent -> problem id -> indices."""
    schema: int = SCHEMA

    def count(self) -> int:
        return sum(len(indices) for of in self.rows.values() for indices in of.values())

    def keys(self) -> set[Key]:
        return {
            (self.step, agent, problem, index)
            for agent, problems in self.rows.items()
            for problem, indices in problems.items()
            for index in indices
        }


CUT = Wire(CutRecord)


class RowText:
    """To text and back; `pool` names the pool in errors."""

    def __init__(self, pool: str) -> None:
        self.pool = pool

    def encode(self, trajectories: Sequence[Trajectory]) -> Bodies:
        bodies: Bodies = {}
        for trajectory in trajectories:
            key = trajectory.key
            try:
                body = to_json(trajectory)
            except WireError as error:
                raise UserError(f"{self._place(key)}: cannot be published: {error}") from error
            if bodies.setdefault(key, body) != body:
                raise other_content(self.pool, key)
        return bodies

    def decode(self, step: int, record: object, rows: Iterable[Row]) -> Snapshot:
        """The cut that the record names, of all rows of its step."""
        cut = self.record(step, record)
        counted = cut.rows
        with no_garbage():
            found = [
                self.row(row) for row in rows if row[3] in counted.get(row[1], {}).get(row[2], ())
            ]
            if len(found) < cut.count():
                missing = min(cut.keys() - {trajectory.key for trajectory in found})
                raise self.changed(missing, "counts in the cut but is not there")
            return as_snapshot(step, cut.members, found)

    def record(self, step: int, body: object) -> CutRecord:
        try:
            record = CUT.from_json(_text(body))
            if record.schema != SCHEMA:
                raise WireError("schema", f"{record.schema}, but this version reads {SCHEMA}")
            if record.step != step:
                raise WireError("step", f"the record says {record.step}")
            if set(record.rows) != set(record.members):
                raise WireError("rows", "are not those of the members")
        except WireError as error:
            place = f"pool {self.pool}, cut of step {step}"
            raise UserError(f"{place}: {error}. {OUTSIDE}") from error
        return record

    def row(self, row: Row) -> Trajectory:
        """Read one row, trusting nothing in it."""
        key, body = row[:4], row[4]
        try:
            trajectory = from_json(_text(body))
        except WireError as error:
            raise self.changed(key, str(error)) from error
        if trajectory.key != key:
            fields = ("step", "agent", "problem_id", "index")
            for field, column, inside in zip(fields, key, trajectory.key, strict=True):
                if column != inside:
                    raise self.changed(key, f"field {field}: the body says {inside!r}")
        return trajectory

    def changed(self, key: Key, reason: str) -> UserError:
        return UserError(f"{self._place(key)}: {reason}. {OUTSIDE}")

    def _place(self, key: Key) -> str:
        step, agent, problem, index = key
        return (
            f"pool {self.pool}, step {step}, agent {agent!r}, problem {problem!r}, index {index!r}"
        )


def pack(rows: Iterable[tuple[Key, str]]) -> Packed:
    """Two things instead of thousands: a body is JSON, so it has no line break in it."""
    pairs = list(rows)
    return [key for key, _ in pairs], "\n".join([body for _, body in pairs]).encode()


def unpack(packed: Packed) -> Bodies:
    keys, lines = packed
    return dict(zip(keys, lines.decode().split("\n"), strict=True)) if keys else {}


def _text(body: object) -> str:
    if not isinstance(body, str):
        raise WireError("body", f"must be text, not {body!r}")
    return body
