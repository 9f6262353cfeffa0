"""A pool in a database, through SQLAlchemy Core and plain portable SQL. SQLite is the tested one.

Nothing here leans on one database's "insert or ignore": a write that meets a key already stored
fails as a whole and is tried again, comparing row by row. The cut record alone says which rows
count; the `late` column is only for people who look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, Text, insert, select
from sqlalchemy import func as sql
from sqlalchemy.exc import IntegrityError

from hacrl.errors import UserError
from hacrl.pool import Key, as_cut, check_members, not_closed, other_content
from hacrl.pool.database import Database
from hacrl.pool.wire import Wire, WireError, from_json, to_json
from hacrl.types import SCHEMA, STORED, Cut, Trajectory

_TABLES = MetaData()
_ROWS = Table(
    "trajectories",
    _TABLES,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("agent", String, primary_key=True),
    Column("problem_id", String, primary_key=True),
    Column("idx", Integer, primary_key=True, autoincrement=False),
    Column("late", Integer, nullable=False),
    Column("body", Text, nullable=False),
)
_ARRIVALS = Table(
    "arrivals",
    _TABLES,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("agent", String, primary_key=True),
)
_CUTS = Table(
    "cuts",
    _TABLES,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False),
)
_KEY = (_ROWS.c.step, _ROWS.c.agent, _ROWS.c.problem_id, _ROWS.c.idx)
_OUTSIDE = "It was changed outside hacrl: put the stored file back, or start the run anew"


@dataclass(frozen=True)
class _CutRecord:
    """What `cuts.body` holds.

    Example: {"step": 3, "members": ["ant"], "rows": {"ant": {"q1": [0, 1]}}, "schema": 1}
    """

    __pydantic_config__ = STORED

    step: int
    members: tuple[str, ...]
    rows: dict[str, dict[str, tuple[int, ...]]]
    """Agent -> problem id -> indices."""
    schema: int = SCHEMA

    def keys(self) -> set[Key]:
        return {
            (self.step, agent, problem, index)
            for agent, problems in self.rows.items()
            for problem, indices in problems.items()
            for index in indices
        }


_CUT = Wire(_CutRecord)


class SqlPool:
    """See `hacrl.pool.Pool`."""

    def __init__(self, url: str, base: Path, create: bool = True) -> None:
        self._db = Database(url, base, _TABLES, create)
        self._name = self._db.name

    def publish(self, trajectories: Sequence[Trajectory]) -> None:
        bodies: dict[Key, str] = {}
        for trajectory in trajectories:
            key = trajectory.key
            try:
                body = to_json(trajectory)
            except WireError as error:
                raise UserError(f"{self._place(key)}: cannot be published: {error}") from error
            if bodies.setdefault(key, body) != body:
                raise other_content(self._name, key)
        if not bodies:
            return
        try:
            with self._db.write() as connection:
                _add(connection, bodies)
        except IntegrityError:  # some are here already
            self._db.retry(lambda: self._publish_missing(bodies))

    def arrive(self, step: int, agent: str) -> None:
        here = select(_ARRIVALS).where(_ARRIVALS.c.step == step, _ARRIVALS.c.agent == agent)

        def note() -> None:
            with self._db.write() as connection:
                if connection.execute(here).first() is None:
                    connection.execute(insert(_ARRIVALS), {"step": step, "agent": agent})

        self._db.retry(note)

    def arrived(self, step: int) -> tuple[str, ...]:
        with self._db.read() as connection:
            names = connection.scalars(select(_ARRIVALS.c.agent).where(_ARRIVALS.c.step == step))
            return tuple(sorted(names))

    def close(self, step: int, members: Sequence[str]) -> None:
        check_members(step, members)

        def commit() -> None:
            with self._db.write() as connection:
                if not _closed(connection, [step]):
                    record = self._record(connection, step, members)
                    body = _CUT.to_json(record)
                    connection.execute(insert(_CUTS), {"step": step, "body": body})

        self._db.retry(commit)

    def closed(self, step: int) -> bool:
        with self._db.read() as connection:
            return bool(_closed(connection, [step]))

    def gather(self, step: int) -> Cut:
        with self._db.read() as connection:  # cut and rows of the same moment
            body = connection.scalar(select(_CUTS.c.body).where(_CUTS.c.step == step))
            if body is None:
                raise not_closed(self._name, step)
            record = self._read_cut(step, body)
            query = select(*_KEY, _ROWS.c.body).where(_ROWS.c.step == step)
            rows = connection.execute(query).tuples().all()
        wanted = record.keys()
        found = {row[:4]: self._read_row(row[:4], row[4]) for row in rows if row[:4] in wanted}
        if len(found) < len(wanted):
            raise self._changed(min(wanted - found.keys()), "counts in the cut but is not there")
        return as_cut(step, record.members, found.values())

    def rows(self, agent: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        query = select(*_KEY, _ROWS.c.body)
        if agent is not None:
            query = query.where(_ROWS.c.agent == agent)
        for at in [step] if step is not None else self._steps():
            # A step at a time: nothing stays open in the database while the caller works.
            with self._db.read() as connection:
                found = connection.execute(query.where(_ROWS.c.step == at)).tuples().all()
            read = [self._read_row(row[:4], row[4]) for row in found]
            yield from sorted(read, key=lambda trajectory: trajectory.key)

    def late(self, step: int) -> int:
        query = select(sql.count()).where(_ROWS.c.step == step, _ROWS.c.late == 1)
        with self._db.read() as connection:
            return connection.scalar(query) or 0

    def dispose(self) -> None:
        self._db.dispose()

    def _publish_missing(self, bodies: dict[Key, str]) -> None:
        stored: dict[Key, Any] = {}
        with self._db.write() as connection:
            for step, agent in {key[:2] for key in bodies}:
                query = select(*_KEY, _ROWS.c.body)
                query = query.where(_ROWS.c.step == step, _ROWS.c.agent == agent)
                stored.update((row[:4], row[4]) for row in connection.execute(query).tuples())
            for key, body in bodies.items():
                if stored.get(key, body) != body:
                    raise other_content(self._name, key)
            _add(connection, {key: body for key, body in bodies.items() if key not in stored})

    def _steps(self) -> list[int]:
        with self._db.read() as connection:
            steps = connection.scalars(select(_ROWS.c.step).distinct()).all()
        for step in steps:
            if not isinstance(step, int):  # SQLite keeps any type in any column
                raise UserError(f"pool {self._name}: a row is of step {step!r}. {_OUTSIDE}")
        return sorted(steps)

    def _record(self, connection: Connection, step: int, members: Sequence[str]) -> _CutRecord:
        """The cut as it stands now."""
        rows: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in members}
        keys = connection.execute(select(*_KEY).where(_ROWS.c.step == step)).tuples().all()
        for key in keys:
            if tuple(type(part) for part in key) != (int, str, str, int):
                raise self._changed(key, "not a key")
        for _, agent, problem, index in sorted(keys):
            if agent in rows:
                rows[agent][problem] = (*rows[agent].get(problem, ()), index)
        return _CutRecord(step, tuple(members), rows)

    def _read_cut(self, step: int, body: object) -> _CutRecord:
        try:
            record = _CUT.from_json(_text(body))
            if record.schema != SCHEMA:
                raise WireError("schema", f"{record.schema}, but this version reads {SCHEMA}")
            if record.step != step:
                raise WireError("step", f"the record says {record.step}")
            if set(record.rows) != set(record.members):
                raise WireError("rows", "are not those of the members")
        except WireError as error:
            place = f"pool {self._name}, cut of step {step}"
            raise UserError(f"{place}: {error}. {_OUTSIDE}") from error
        return record

    def _read_row(self, key: Key, body: object) -> Trajectory:
        """Read one row, trusting nothing in it."""
        try:
            trajectory = from_json(_text(body))
        except WireError as error:
            raise self._changed(key, str(error)) from error
        if trajectory.key != key:
            fields = ("step", "agent", "problem_id", "index")
            for field, column, inside in zip(fields, key, trajectory.key, strict=True):
                if column != inside:
                    raise self._changed(key, f"field {field}: the body says {inside!r}")
        return trajectory

    def _changed(self, key: Key, reason: str) -> UserError:
        return UserError(f"{self._place(key)}: {reason}. {_OUTSIDE}")

    def _place(self, key: Key) -> str:
        step, agent, problem, index = key
        return (
            f"pool {self._name}, step {step}, agent {agent!r}, problem {problem!r}, index {index!r}"
        )


def _text(body: object) -> str:
    if not isinstance(body, str):
        raise WireError("body", f"must be text, not {body!r}")
    return body


def _closed(connection: Connection, steps: Iterable[int]) -> set[int]:
    return set(connection.scalars(select(_CUTS.c.step).where(_CUTS.c.step.in_(list(steps)))))


def _add(connection: Connection, bodies: dict[Key, str]) -> None:
    closed = _closed(connection, {key[0] for key in bodies})
    rows = [
        {
            "step": step,
            "agent": agent,
            "problem_id": problem,
            "idx": index,
            "late": int(step in closed),
            "body": body,
        }
        for (step, agent, problem, index), body in bodies.items()
    ]
    if rows:
        connection.execute(insert(_ROWS), rows)
