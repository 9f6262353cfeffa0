"""What the hub has stored: rows of the database, parts of batches as files, and the present state.

DATA/parts/ab/SHA256.jsonl.gz    outcomes and texts, named by the sha256 of their lines
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from hacrl.errors import UserError
from hacrl.owners.charter import TeamRecord
from hacrl.owners.hub import tables as t
from hacrl.owners.signing import Signed
from hacrl.store.files import sweep, write_atomic


class Records:
    """Rows and files of one team, and the state that follows from them."""

    def __init__(
        self, team: TeamRecord, engine: Engine, data: Path, keep_steps: int | None
    ) -> None:
        self.engine, self.folder, self.keep_steps = engine, data / "parts", keep_steps
        self.lock = RLock()
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep(self.folder)
        self._pruned = 0
        self._load(team)

    def _load(self, team: TeamRecord) -> None:
        """Read the state from the database."""
        with self.engine.begin() as db:
            owner = db.scalar(select(t.facts.c.value).where(t.facts.c.name == "team"))
            if owner is None:
                db.execute(insert(t.facts).values(name="team", value=team.id))
            elif owner != team.id:
                raise UserError(
                    f"--database: it belongs to the team {owner[:16]}..., but the charter is of "
                    f"{team.id[:16]}...: give another database"
                )
            records = db.scalars(select(t.amendments.c.record).order_by(t.amendments.c.number))
            chain = [Signed.decode("amendment", r.encode()) for r in records]
            self.team = TeamRecord.verified(team.signed, chain)
            newest = db.execute(
                select(t.snapshots.c.record).order_by(t.snapshots.c.step.desc()).limit(1)
            ).scalar()
        self.head = Signed.decode("snapshot", newest.encode()) if newest else None
        self.open = self.head.content["step"] + 1 if self.head else 0
        """The step that is not closed yet."""

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction. After a failed one the state is read again from the database."""
        with self.lock:
            try:
                with self.engine.begin() as db:
                    yield db
            except SQLAlchemyError:
                self._load(self.team)
                raise

    def arrival(
        self, step: int, agent: str, kind: str, db: Connection | None = None
    ) -> RowMapping | None:
        a = t.arrivals.c
        query = select(t.arrivals).where(a.step == step, a.agent == agent, a.kind == kind)
        if db is not None:
            return db.execute(query).mappings().first()
        with self.engine.connect() as own:
            return own.execute(query).mappings().first()

    def exists(self, table: Any, step: int, agent: str, db: Connection | None) -> bool:
        query = select(table.c.step).where(table.c.step == step, table.c.agent == agent)
        if db is not None:
            return db.execute(query).first() is not None
        with self.engine.connect() as own:
            return own.execute(query).first() is not None

    def snapshot_of(self, step: int) -> Signed | None:
        with self.engine.connect() as db:
            found = db.scalar(select(t.snapshots.c.record).where(t.snapshots.c.step == step))
        return Signed.decode("snapshot", found.encode()) if found else None

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.jsonl.gz"

    def write(self, files: Mapping[str, bytes]) -> None:
        for digest, data in files.items():
            if not self.path(digest).exists():
                write_atomic(self.path(digest), data)

    def prune(self) -> None:
        """Remove the parts of old steps that no newer step uses."""
        end = self.open - self.keep_steps if self.keep_steps else 0
        if end <= self._pruned:
            return
        a = t.arrivals.c
        with self.lock, self.engine.connect() as db:
            used = {
                d
                for row in db.execute(select(a.outcomes, a.texts).where(a.step >= end))
                for d in row
            }
            old = a.step.between(self._pruned, end - 1)
            for row in db.execute(select(a.outcomes, a.texts).where(old, a.kind == "batch")):
                for digest in set(row) - used:
                    self.path(digest).unlink(missing_ok=True)
            self._pruned = end

    def proofs(self) -> list[str]:
        """All recorded proofs, as canonical JSON."""
        with self.engine.connect() as db:
            return list(db.scalars(select(t.proofs.c.record).order_by(t.proofs.c.found)))

    def newest(self, agent: str) -> int | None:
        """The newest step that has a batch of the member."""
        mine = (t.arrivals.c.agent == agent) & (t.arrivals.c.kind == "batch")
        with self.engine.connect() as db:
            return db.scalar(select(func.max(t.arrivals.c.step)).where(mine))

    def arrived(self) -> list[str]:
        """The members that have sent a batch or a skip of the open step."""
        with self.engine.connect() as db:
            here = t.arrivals.c.step == self.open
            return sorted(set(db.scalars(select(t.arrivals.c.agent).where(here))))
