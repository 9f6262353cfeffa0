"""What the hub has stored: rows of the database, parts of batches as files, and the present state.

DATA/parts/ab/SHA256.jsonl.gz    outcomes and texts, named by the sha256 of their lines

The database, SQLite or PostgreSQL, holds records as the signed bytes that members can verify. A record
is committed before the hub acknowledges it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hacrl.errors import UserError, first_line
from hacrl.owners.charter import TeamRecord
from hacrl.owners.signing import Signed
from hacrl.store.files import sweep, write_atomic

metadata = sa.MetaData()

facts = sa.Table(
    "facts",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.Text),
)
"""The team id."""

amendments = sa.Table(
    "amendments",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
)
arrivals = sa.Table(
    "arrivals",
    metadata,
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("agent", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(8), primary_key=True),  # batch or skip
    sa.Column("late", sa.Boolean, nullable=False),
    sa.Column("received", sa.Float, nullable=False),
    sa.Column("outcomes", sa.String(64), index=True),
    sa.Column("texts", sa.String(64), index=True),
    sa.Column("record", sa.Text, nullable=False),  # the signed envelope or skip
    sa.Column("receipt", sa.Text, nullable=False),
)
snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("closed", sa.Float, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)
reveals = sa.Table(
    "reveals",
    metadata,
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("agent", sa.String(64), primary_key=True),
)
"""Members that read a step without a batch of their own; they cannot publish one any more."""

proofs = sa.Table(
    "proofs",
    metadata,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("agent", sa.String(64), nullable=False),
    sa.Column("found", sa.Float, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)


def connect(url: str) -> sa.Engine:
    """Open the database and create missing tables.

    Example: connect("sqlite:///hub.db"), connect("postgresql://hacrl@localhost/hub")
    """
    try:
        parsed = sa.make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise UserError("--database: give sqlite:///FILE or postgresql://USER@HOST/NAME")
        engine = sa.create_engine(parsed, pool_pre_ping=True)
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "connect", _durable)
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


class Records:
    """Rows and files of one team, and the state that follows from them."""

    def __init__(
        self, team: TeamRecord, engine: sa.Engine, data: Path, keep_steps: int | None
    ) -> None:
        self.engine, self.folder = engine, data / "parts"
        self.keep_steps = keep_steps and max(keep_steps, team.charter.staleness + 1)
        self.lock = RLock()
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep(self.folder)
        self._pruned = 0
        with engine.begin() as db:
            owner = db.scalar(sa.select(facts.c.value).where(facts.c.name == "team"))
            if owner is None:
                db.execute(sa.insert(facts).values(name="team", value=team.id))
            elif owner != team.id:
                raise UserError(
                    f"--database: it belongs to the team {owner[:16]}..., but the charter is of "
                    f"{team.id[:16]}...: give another database"
                )
        self._load(team)

    def _load(self, team: TeamRecord) -> None:
        """Read the state from the database."""
        rows = self.rows(sa.select(amendments.c.record).order_by(amendments.c.number))
        self.team = TeamRecord.verified(team.signed, [decoded("amendment", r.record) for r in rows])
        newest = self.rows(sa.select(snapshots.c.record).order_by(snapshots.c.step.desc()).limit(1))
        self.head = decoded("snapshot", newest[0].record) if newest else None
        self.open = self.head.content["step"] + 1 if self.head else 0
        """The step that is not closed yet."""

    def rows(self, query: sa.Select[Any], db: sa.Connection | None = None) -> Sequence[Any]:
        """The rows of a query, in the transaction `db` if it is given."""
        with nullcontext(db) if db else self.engine.connect() as connection:
            return connection.execute(query).all()

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction. After a failed one the state is read again from the database."""
        with self.lock:
            try:
                with self.engine.begin() as db:
                    yield db
            except SQLAlchemyError:
                self._load(self.team)
                raise

    def arrival(self, step: int, agent: str, kind: str, db: sa.Connection | None = None) -> Any:
        """The row of a batch or skip; None without one."""
        a = arrivals.c
        query = sa.select(arrivals).where(a.step == step, a.agent == agent, a.kind == kind)
        return next(iter(self.rows(query, db)), None)

    def snapshot_of(self, step: int) -> Signed | None:
        """The snapshot of a step; None if the step is not closed."""
        found = self.rows(sa.select(snapshots.c.record).where(snapshots.c.step == step))
        return decoded("snapshot", found[0].record) if found else None

    def proofs(self) -> list[str]:
        """All recorded proofs, as canonical JSON."""
        return [r.record for r in self.rows(sa.select(proofs.c.record).order_by(proofs.c.found))]

    def newest(self, agent: str) -> int | None:
        """The newest step that has a batch of the member."""
        mine = (arrivals.c.agent == agent) & (arrivals.c.kind == "batch")
        step: int | None = self.rows(sa.select(sa.func.max(arrivals.c.step)).where(mine))[0][0]
        return step

    def arrived(self) -> list[str]:
        """The members that have sent a batch or a skip of the open step."""
        found = self.rows(sa.select(arrivals.c.agent).where(arrivals.c.step == self.open))
        return sorted({r.agent for r in found})

    def path(self, digest: str) -> Path:
        """The file of a part."""
        return self.folder / digest[:2] / f"{digest}.jsonl.gz"

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write parts that are not there yet."""
        for digest, data in files.items():
            if not self.path(digest).exists():
                write_atomic(self.path(digest), data)

    def prune(self) -> None:
        """Remove the parts of old steps that no newer step uses."""
        end = self.open - self.keep_steps if self.keep_steps else 0
        if end <= self._pruned:
            return
        a = arrivals.c
        parts = sa.select(a.outcomes, a.texts).where(a.kind == "batch")
        with self.lock:
            used = {digest for row in self.rows(parts.where(a.step >= end)) for digest in row}
            for row in self.rows(parts.where(a.step.between(self._pruned, end - 1))):
                for digest in set(row) - used:
                    self.path(digest).unlink(missing_ok=True)
            self._pruned = end


def decoded(kind: str, record: str) -> Signed:
    """A signed record of the database."""
    return Signed.decode(kind, record.encode())
