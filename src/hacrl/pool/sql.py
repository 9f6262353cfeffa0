"""A pool in a database, through SQLAlchemy Core and plain portable SQL. SQLite is the tested one.

Nothing here leans on one database's "insert or ignore": a write that meets a key already stored
fails as a whole and is tried again, row by row compared. The cut record alone says which rows count;
the `late` column is only for people who look.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, String, Table, Text
from sqlalchemy import create_engine, event, func, insert, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import OperationalError

from hacrl.errors import UserError
from hacrl.files import full_disk_error
from hacrl.pool import Key, as_cut, check_members, not_closed, other_content
from hacrl.pool.wire import Wire, WireError, from_json, to_json
from hacrl.types import SCHEMA, Cut, Trajectory

WAIT = 30.0
"""Seconds to wait for another process that is writing."""

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


@dataclass(frozen=True)
class _CutRecord:
    """What `cuts.body` holds. Example: {"step": 3, "members": ["ant"], "rows": {"ant": {"q1": [0, 1]}},
    "schema": 1}"""

    __pydantic_config__ = {"extra": "forbid"}

    step: int
    members: tuple[str, ...]
    rows: dict[str, dict[str, tuple[int, ...]]]
    """Agent -> problem id -> indices."""
    schema: int = SCHEMA


_CUT = Wire(_CutRecord)


class SqlPool:
    """See `hacrl.pool.Pool`."""

    def __init__(self, url: str, base: Path, create: bool = True) -> None:
        self._url = _resolve(url, base)
        self._name = self._url.render_as_string(hide_password=True)
        self._engine = _engine(self._url)
        lite = self._url.get_backend_name() == "sqlite"
        self._file = Path(self._url.database) if lite and self._url.database else None
        if self._file is not None and not create and not self._file.exists():
            raise UserError(f"pool {self._name}: there is no such file")
        if create:
            self._create()

    def publish(self, trajectories: Sequence[Trajectory]) -> None:
        bodies: dict[Key, str] = {}
        for trajectory in trajectories:
            key = trajectory.key
            with self._place(key):
                body = to_json(trajectory)
            if bodies.setdefault(key, body) != body:
                raise other_content(self._name, key)
        if bodies:
            try:
                self._insert(bodies)
            except IntegrityError:  # some are here already
                self._again(lambda: self._insert_missing(bodies))

    def arrive(self, step: int, agent: str) -> None:
        def note() -> None:
            with self._write() as connection:
                there = select(_ARRIVALS).where(
                    _ARRIVALS.c.step == step, _ARRIVALS.c.agent == agent
                )
                if connection.execute(there).first() is None:
                    connection.execute(insert(_ARRIVALS), {"step": step, "agent": agent})

        self._again(note)

    def arrived(self, step: int) -> tuple[str, ...]:
        with self._read() as connection:
            names = connection.scalars(select(_ARRIVALS.c.agent).where(_ARRIVALS.c.step == step))
            return tuple(sorted(names))

    def close(self, step: int, members: Sequence[str]) -> None:
        check_members(step, members)

        def commit() -> None:
            with self._write() as connection:
                if _closed(connection, (step,)):
                    return
                rows: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in members}
                keys = select(_ROWS.c.agent, _ROWS.c.problem_id, _ROWS.c.idx)
                for agent, problem, index in sorted(
                    connection.execute(keys.where(_ROWS.c.step == step)).tuples()
                ):
                    if agent in rows:
                        rows[agent][problem] = (*rows[agent].get(problem, ()), index)
                body = _CUT.to_json(_CutRecord(step, tuple(members), rows))
                connection.execute(insert(_CUTS), {"step": step, "body": body})

        self._again(commit)

    def closed(self, step: int) -> bool:
        with self._read() as connection:
            return bool(_closed(connection, (step,)))

    def gather(self, step: int) -> Cut:
        with self._read() as connection:  # one transaction: cut and rows of the same moment
            text = connection.scalar(select(_CUTS.c.body).where(_CUTS.c.step == step))
            if text is None:
                raise not_closed(self._name, step)
            record = self._cut(step, text)
            query = select(*_KEY, _ROWS.c.body).where(_ROWS.c.step == step)
            rows = connection.execute(query).tuples().all()
        wanted = {
            (step, agent, problem, index)
            for agent, problems in record.rows.items()
            for problem, indices in problems.items()
            for index in indices
        }
        found = {row[:4]: self._row(row[:4], row[4]) for row in rows if row[:4] in wanted}
        for key in sorted(wanted - found.keys())[:1]:
            raise self._changed(key, "the row counts in the step's cut but is not there")
        return as_cut(step, record.members, found.values())

    def rows(self, agent: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        query = select(*_KEY, _ROWS.c.body)
        if agent is not None:
            query = query.where(_ROWS.c.agent == agent)
        steps = [step] if step is not None else self._steps()
        for at in steps:  # a step at a time: nothing stays open while the caller works
            with self._read() as connection:
                found = connection.execute(query.where(_ROWS.c.step == at)).tuples().all()
            for row in sorted(found, key=lambda row: row[:4]):
                yield self._row(row[:4], row[4])

    def late(self, step: int) -> int:
        query = (
            select(func.count()).select_from(_ROWS).where(_ROWS.c.step == step, _ROWS.c.late == 1)
        )
        with self._read() as connection:
            return connection.scalar(query) or 0

    def dispose(self) -> None:
        self._engine.dispose()

    def _insert(self, bodies: dict[Key, str]) -> None:
        with self._write() as connection:
            self._add(connection, bodies)

    def _insert_missing(self, bodies: dict[Key, str]) -> None:
        with self._write() as connection:
            stored: dict[Key, Any] = {}
            for step, agent in {key[:2] for key in bodies}:
                query = select(*_KEY, _ROWS.c.body)
                query = query.where(_ROWS.c.step == step, _ROWS.c.agent == agent)
                stored.update((row[:4], row[4]) for row in connection.execute(query).tuples())
            for key, body in bodies.items():
                if stored.get(key, body) != body:
                    raise other_content(self._name, key)
            self._add(connection, {key: body for key, body in bodies.items() if key not in stored})

    def _add(self, connection: Connection, bodies: dict[Key, str]) -> None:
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

    def _steps(self) -> list[int]:
        with self._read() as connection:
            return sorted(connection.scalars(select(_ROWS.c.step).distinct()))

    def _cut(self, step: int, text: object) -> _CutRecord:
        try:
            if not isinstance(text, str):
                raise WireError("body", f"must be text, not {text!r}")
            record = _CUT.from_json(text)
            if record.schema != SCHEMA:
                raise WireError("schema", f"{record.schema}, but this version reads {SCHEMA}")
            if record.step != step:
                raise WireError("step", f"the record says {record.step}")
            if not set(record.rows) <= set(record.members):
                raise WireError("rows", "names an agent that is not among the members")
        except WireError as error:
            raise UserError(
                f"pool {self._name}, cut of step {step}: {error}. {_OUTSIDE}"
            ) from error
        return record

    def _row(self, key: Key, body: object) -> Trajectory:
        """Read one row, trusting nothing in it."""
        try:
            if not isinstance(body, str):
                raise WireError("body", f"must be text, not {body!r}")
            trajectory = from_json(body)
        except WireError as error:
            raise self._changed(key, str(error)) from error
        if trajectory.key != key:
            fields = ("step", "agent", "problem_id", "index")
            for field, column, inside in zip(fields, key, trajectory.key, strict=True):
                if column != inside:
                    raise self._changed(key, f"field {field}: the body says {inside!r}")
        return trajectory

    def _changed(self, key: Key, reason: str) -> UserError:
        step, agent, problem, index = key
        return UserError(
            f"pool {self._name}, step {step}, agent {agent!r}, problem {problem!r}, "
            f"index {index}: {reason}. {_OUTSIDE}"
        )

    @contextmanager
    def _place(self, key: Key) -> Iterator[None]:
        try:
            yield
        except WireError as error:
            step, agent, problem, index = key
            raise UserError(
                f"pool {self._name}: cannot publish step {step}, agent {agent!r}, problem "
                f"{problem!r}, index {index}: {error}"
            ) from error

    def _create(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._use_wal()

        def make() -> None:
            with self._write() as connection:
                _TABLES.create_all(connection)

        self._again(make)

    def _use_wal(self) -> None:
        """Readers and one writer side by side. SQLite does not wait for the lock here by itself."""
        until = time.monotonic() + WAIT
        while True:
            try:
                with self._errors(), self._engine.connect() as connection:
                    raw = connection.connection.dbapi_connection
                    assert raw is not None
                    raw.cursor().execute("PRAGMA journal_mode=WAL")
                return
            except _Busy:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _again(self, write: Any) -> None:
        """Run a checked write; if another process slipped a key in between, check again."""
        for _ in range(5):
            try:
                write()
                return
            except IntegrityError:
                continue
        write()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._errors(), self._engine.connect() as plain:
            connection = plain.execution_options(hacrl_write=True)
            with connection.begin():
                yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say in the user's words what the database complains of."""
        try:
            yield
        except IntegrityError:
            raise
        except DBAPIError as error:
            reason = str(error.orig)
            if self._file is not None and any(sign in reason for sign in _NO_ROOM):
                raise full_disk_error(self._file, reason) from error
            if isinstance(error, OperationalError) and "locked" in reason:
                raise _Busy(
                    f"pool {self._name}: another process has been writing for {WAIT:.0f} seconds; "
                    "end it, or give this run its own pool.url"
                ) from error
            raise UserError(f"pool {self._name}: not usable as a pool: {reason}") from error


class _Busy(UserError):
    """Another process holds the lock."""


_OUTSIDE = "It was changed outside hacrl: put the stored file back, or start the run anew"
_NO_ROOM = ("database or disk is full", "disk I/O error")


def _closed(connection: Connection, steps: Any) -> set[int]:
    return set(connection.scalars(select(_CUTS.c.step).where(_CUTS.c.step.in_(steps))))


def _resolve(url: str, base: Path) -> URL:
    """Make a relative SQLite path one of the run directory."""
    try:
        made = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UserError(f"pool.url = {url!r}: not an address ({error})") from error
    if made.get_backend_name() != "sqlite":
        return made
    if made.host or not made.database or made.database == ":memory:":
        raise UserError(
            f"pool.url = {url!r}: write sqlite:///NAME.db for a file in the run directory, "
            "sqlite:////PATH.db for one anywhere, memory:// for none"
        )
    return made.set(database=str(base.absolute() / made.database))


def _engine(url: URL) -> Engine:
    name = url.render_as_string(hide_password=True)
    try:
        engine = create_engine(url)
    except (NoSuchModuleError, ImportError) as error:
        raise UserError(f"pool.url = {name!r}: its driver is not installed ({error})") from error
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = (
        None  # transactions begin where we say, not where the driver guesses
    )
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(WAIT * 1000)}")
    cursor.execute("PRAGMA synchronous=FULL")  # a committed cut survives a power cut as well
    cursor.close()


def _on_begin(connection: Connection) -> None:
    # A writer takes the lock before it looks, so that what it has seen still holds when it writes.
    write = connection.get_execution_options().get("hacrl_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
