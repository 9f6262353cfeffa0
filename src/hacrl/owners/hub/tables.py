"""The hub's database: SQLite or PostgreSQL.

The database holds records, as the signed bytes that members can verify. The batches are files named by
digest (store.py). A record is committed before the hub acknowledges it.
"""

from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Engine,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.exc import SQLAlchemyError

from hacrl.errors import UserError, first_line

metadata = MetaData()

facts = Table(
    "facts", metadata, Column("name", String(32), primary_key=True), Column("value", Text)
)
"""The team id and the version of the tables."""

amendments = Table(
    "amendments",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("record", Text, nullable=False),
)
arrivals = Table(
    "arrivals",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("agent", String(64), primary_key=True),
    Column("kind", String(8), primary_key=True),  # batch or skip
    Column("late", Boolean, nullable=False),
    Column("received", Float, nullable=False),
    Column("outcomes", String(64), index=True),
    Column("texts", String(64), index=True),
    Column("record", Text, nullable=False),  # the signed envelope or skip
    Column("receipt", Text, nullable=False),
)
snapshots = Table(
    "snapshots",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("closed", Float, nullable=False),
    Column("record", Text, nullable=False),
)
reveals = Table(
    "reveals",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("agent", String(64), primary_key=True),
)
"""Members that read a step without a batch of their own; they cannot publish one any more."""

proofs = Table(
    "proofs",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("step", Integer, nullable=False),
    Column("agent", String(64), nullable=False),
    Column("found", Float, nullable=False),
    Column("record", Text, nullable=False),
)


def connect(url: str) -> Engine:
    """Open the database and create missing tables.

    Example: connect("sqlite:///hub.db"), connect("postgresql://hacrl@localhost/hub")
    """
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise UserError(
                f"--database: {parsed.get_backend_name()!r} is not supported; give sqlite:///FILE or "
                "postgresql://USER@HOST/NAME"
            )
        engine = create_engine(parsed, pool_pre_ping=True)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _durable)
        metadata.create_all(engine)
    except (SQLAlchemyError, ImportError) as error:
        raise UserError(
            f"--database: cannot open it ({first_line(error)}). Check the URL and that the server runs"
        ) from error
    return engine


def _durable(connection: Any, _: Any) -> None:
    """A commit is on the disk before it returns, and readers do not wait for writers."""
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 10000"):
        connection.execute(f"PRAGMA {pragma}")
