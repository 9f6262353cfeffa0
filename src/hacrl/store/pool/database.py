"""A database as a pool needs it: the address, who may write when, and complaints in plain words."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from hacrl.errors import UserError
from hacrl.store.files import full_disk, full_disk_error
from hacrl.store.pool import shown

WAIT = 30.0
"""Seconds to wait for another process that is writing."""

_PAGE, _LOG, _CACHE = 32 << 10, 64 << 20, 64 << 20
"""SQLite: bytes of a page (of a new file), of the log before it is copied over, of memory used."""

_NO_ROOM = ("database or disk is full", "disk I/O error")


class Busy(UserError):
    """Another process holds the lock."""


class Database:
    """Transactions to read and to write, by SQLAlchemy URL."""

    def __init__(self, url: str, base: Path, tables: MetaData, create: bool) -> None:
        resolved = _resolve(url, base)
        self.name = resolved.render_as_string(hide_password=True)
        lite = resolved.get_backend_name() == "sqlite"
        self._file = Path(str(resolved.database)) if lite else None
        if self._file is not None and not create and not self._file.is_file():
            raise UserError(f"pool {self.name}: there is no such file")
        self._engine = _engine(resolved, self.name)
        if create:
            self._create(tables)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One moment of the database, whatever is written meanwhile."""
        with self._errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: all of it or nothing."""
        with self._errors(), self._engine.connect() as plain:
            connection = plain.execution_options(hacrl_write=True)
            with connection.begin():
                yield connection

    def retry(self, write: Callable[[], None]) -> None:
        """Run a write that looks before it inserts; if another process was faster, look again."""
        for _ in range(5):
            try:
                return write()
            except IntegrityError:
                continue
        write()

    def dispose(self) -> None:
        self._engine.dispose()

    def _create(self, tables: MetaData) -> None:
        if self._file is not None:
            with full_disk(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
            self._use_wal()

        def make() -> None:
            with self.write() as connection:
                tables.create_all(connection)

        self.retry(make)

    def _use_wal(self) -> None:
        """Readers and one writer side by side. SQLite does not itself wait for the lock here."""
        until = time.monotonic() + WAIT
        while True:
            try:
                with self._errors(), self._engine.connect() as connection:
                    raw = connection.connection.dbapi_connection
                    assert raw is not None
                    raw.cursor().execute("PRAGMA journal_mode=WAL")
                return
            except Busy:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say in the user's words what the database complains of."""
        try:
            yield
        except IntegrityError:
            raise  # a key that is there already: the caller's to judge
        except DBAPIError as error:
            raise self._plain(str(error.orig)) from error
        except sqlite3.Error as error:  # a statement that went straight to the driver
            raise self._plain(str(error)) from error

    def _plain(self, reason: str) -> UserError:
        if self._file is not None and any(sign in reason for sign in _NO_ROOM):
            return full_disk_error(self._file, reason)
        if "locked" in reason:
            return Busy(
                f"pool {self.name}: another process has been writing for {WAIT:.0f} seconds; end "
                "it, or give this run its own pool.url"
            )
        return UserError(f"pool {self.name}: not usable as a pool: {reason}")


def _resolve(url: str, base: Path) -> URL:
    """Make a relative SQLite path one of the run directory."""
    try:
        made = make_url(url)
    except (ArgumentError, ValueError) as error:
        # What SQLAlchemy says may quote a part of the password.
        raise UserError(
            f"pool.url = {shown(url)!r}: not an address. Write scheme://USER:PASSWORD@HOST:PORT/NAME, "
            "with %XX for special characters of the password"
        ) from error
    if made.get_backend_name() != "sqlite":
        return made
    if made.host or not made.database or made.database == ":memory:":
        raise UserError(
            f"pool.url = {shown(url)!r}: write sqlite:///NAME.db for a file in the run directory, "
            "sqlite:////PATH.db for one anywhere, memory:// for none"
        )
    return made.set(database=str(base.absolute() / made.database))


def _engine(url: URL, name: str) -> Engine:
    try:
        engine = create_engine(url)
    except (NoSuchModuleError, ImportError) as error:
        raise UserError(f"pool.url = {name!r}: its driver is not installed ({error})") from error
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # a transaction begins where we say, not where it is guessed
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(WAIT * 1000)}")
    cursor.execute("PRAGMA synchronous=FULL")  # a committed cut survives a power cut as well
    # Rows are a few KB: pages that hold several, and a log that is not copied over at every commit.
    cursor.execute(f"PRAGMA page_size={_PAGE}")
    cursor.execute(f"PRAGMA wal_autocheckpoint={_LOG // _PAGE}")
    cursor.execute(f"PRAGMA cache_size={-_CACHE // 1024}")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    # A writer takes the lock before it looks, so that what it has seen still holds when it writes.
    write = connection.get_execution_options().get("hacrl_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
