"""A pool in a database, through SQLAlchemy Core and plain portable SQL. SQLite is the tested one.

Nothing here leans on one database's "insert or ignore": a write that meets a key already stored
fails as a whole and is tried again, comparing row by row. The cut record alone says which rows
count; the `late` column is only for people who look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Text,
    insert,
    select,
)
from sqlalchemy import func as sql
from sqlalchemy.exc import IntegrityError

from hacrl.errors import UserError
from hacrl.garbage import no_garbage
from hacrl.store.pool import Key, check_members, not_closed, other_content
from hacrl.store.pool.database import Database
from hacrl.store.pool.text import CUT, OUTSIDE, Bodies, CutRecord, Row, RowText
from hacrl.types import Snapshot, Trajectory

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


class SqlPool:
    """See `hacrl.store.pool.Pool`."""

    def __init__(self, url: str, base: Path, create: bool = True) -> None:
        self._db = Database(url, base, _TABLES, create)
        self.text = RowText(self._db.name)

    def publish(self, trajectories: Sequence[Trajectory]) -> None:
        self.put(self.text.encode(trajectories))

    def put(self, bodies: Bodies) -> None:
        """Publish rows that are text already."""
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
                    body = CUT.to_json(record)
                    connection.execute(insert(_CUTS), {"step": step, "body": body})

        self._db.retry(commit)

    def closed(self, step: int) -> bool:
        with self._db.read() as connection:
            return bool(_closed(connection, [step]))

    def gather(self, step: int) -> Snapshot:
        with self._db.read() as connection, no_garbage():  # record and rows of the same moment
            record = self._record_of(connection, step)
            # Read as they come: text and trajectories of a whole step are not both in memory.
            parts = connection.execute(_rows_of(step)).partitions(256)
            return self.text.decode(step, record, chain.from_iterable(parts))

    def stored(self, step: int) -> tuple[str, list[Row]]:
        """The cut's record and all rows of the step, as text."""
        with self._db.read() as connection, no_garbage():
            record = self._record_of(connection, step)
            return record, [tuple(row) for row in connection.execute(_rows_of(step))]

    def members(self, step: int) -> tuple[str, ...]:
        with self._db.read() as connection:
            return self.text.record(step, self._record_of(connection, step)).members

    def _record_of(self, connection: Connection, step: int) -> str:
        body = connection.scalar(select(_CUTS.c.body).where(_CUTS.c.step == step))
        if body is None:
            raise not_closed(self.text.pool, step)
        return body

    def rows(self, agent: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        query = select(*_KEY, _ROWS.c.body)
        if agent is not None:
            query = query.where(_ROWS.c.agent == agent)
        for at in [step] if step is not None else self._steps():
            # A step at a time: nothing stays open in the database while the caller works.
            with self._db.read() as connection:
                found = connection.execute(query.where(_ROWS.c.step == at)).all()
            read = [self.text.row(row) for row in found]
            yield from sorted(read, key=lambda trajectory: trajectory.key)

    def late(self, step: int) -> int:
        query = select(sql.count()).where(_ROWS.c.step == step, _ROWS.c.late == 1)
        with self._db.read() as connection:
            return connection.scalar(query) or 0

    def dispose(self) -> None:
        self._db.dispose()

    def _publish_missing(self, bodies: Bodies) -> None:
        stored: dict[Key, Any] = {}
        with self._db.write() as connection:
            for step, agent in {key[:2] for key in bodies}:
                query = select(*_KEY, _ROWS.c.body)
                query = query.where(_ROWS.c.step == step, _ROWS.c.agent == agent)
                stored.update((row[:4], row[4]) for row in connection.execute(query))
            for key, body in bodies.items():
                if stored.get(key, body) != body:
                    raise other_content(self.text.pool, key)
            _add(connection, {key: body for key, body in bodies.items() if key not in stored})

    def _steps(self) -> list[int]:
        with self._db.read() as connection:
            steps = connection.scalars(select(_ROWS.c.step).distinct()).all()
        for step in steps:
            if not isinstance(step, int):  # SQLite keeps any type in any column
                raise UserError(f"pool {self.text.pool}: a row is of step {step!r}. {OUTSIDE}")
        return sorted(steps)

    def _record(self, connection: Connection, step: int, members: Sequence[str]) -> CutRecord:
        """The cut as it stands now."""
        rows: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in members}
        keys = connection.execute(select(*_KEY).where(_ROWS.c.step == step)).all()
        for key in keys:
            if tuple(type(part) for part in key) != (int, str, str, int):
                raise self.text.changed(key, "not a key")
        for _, agent, problem, index in sorted(keys):
            if agent in rows:
                rows[agent][problem] = (*rows[agent].get(problem, ()), index)
        return CutRecord(step, tuple(members), rows)


def _rows_of(step: int) -> Select[Any]:
    return select(*_KEY, _ROWS.c.body).where(_ROWS.c.step == step)


def _closed(connection: Connection, steps: Iterable[int]) -> set[int]:
    return set(connection.scalars(select(_CUTS.c.step).where(_CUTS.c.step.in_(list(steps)))))


def _add(connection: Connection, bodies: Bodies) -> None:
    closed = _closed(connection, {key[0] for key in bodies})
    rows = [(*key, int(key[0] in closed), body) for key, body in bodies.items()]
    if not rows:
        return
    statement = insert(_ROWS).compile(dialect=connection.dialect)
    if statement.positiontup == [column.name for column in _ROWS.columns]:
        # Straight to the driver: naming every value costs more than storing it.
        connection.exec_driver_sql(str(statement), rows)
    else:
        names = [column.name for column in _ROWS.columns]
        connection.execute(insert(_ROWS), [dict(zip(names, row, strict=True)) for row in rows])
