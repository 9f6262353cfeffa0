"""The rules of the hub: what is accepted, when a step closes, and who receives what.

A batch is acknowledged after its parts and its record are on the disk. A step closes when all its
members have sent a batch or a skip, or at the deadline; its snapshot is committed before anyone
receives it. The methods are called from several threads; changes happen under one lock.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, insert, or_, select

from hacrl.errors import UserError
from hacrl.owners.batch import Envelope, Layout, measure
from hacrl.owners.charter import Amended, TeamRecord
from hacrl.owners.hub import records as t
from hacrl.owners.signing import Content, Key, Malformed, Signed, canonical, sha256
from hacrl.trust.publish import receives_texts


class Refused(Exception):
    """A request that the hub refuses: HTTP status, code and one sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class HubStore(t.Records):
    """State of one team on the hub.

    Example: store = HubStore(team, hub_key, connect("sqlite:///hub.db"), Path("hub-data"))
    """

    def __init__(
        self,
        team: TeamRecord,
        key: Key,
        engine: Engine,
        data: Path,
        keep_steps: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if key.public != team.charter.hub:
            raise UserError(
                f"--key: its public key is {key.public}, but the charter has hub = "
                f"{team.charter.hub!r}: give the hub's key"
            )
        super().__init__(team, engine, data, keep_steps)
        self.key, self.clock, self.charter = key.speaking(team.protocol), clock, team.charter
        self.on_close: Callable[[], Any] = lambda: None  # called after a step was closed
        self.close_if_due()
        self.prune()

    # ------------------------------------------------------------ batches and skips

    def put(self, member: str, layout: Layout, parts: tuple[bytes, bytes]) -> Signed:
        """Store a batch and return the receipt; the first receipt if it is stored already."""
        envelope, signed = layout.envelope, layout.signed
        roster = self._member_of(member, envelope.agent, envelope.team, envelope.step)
        if not signed.valid(roster.key):
            raise Refused(403, "signature", f"the envelope is not signed by {member!r}'s key")
        if found := self.arrival(envelope.step, member, "batch"):
            return self._again(found, signed, envelope)
        self._check_counts(envelope, roster.publish)
        self._check_head(envelope)
        self._lateness(envelope.step, member)
        most = self.charter.max_batch_bytes
        outcomes, rows, size = measure(parts[0], most)
        texts, published, _ = measure(parts[1], most - size)
        same = (outcomes, texts) == (envelope.outcomes, envelope.texts)
        if not same or (rows, published) != (envelope.rows, envelope.published):
            raise Malformed("the parts do not have the digests and rows of the envelope")
        files = dict(zip((envelope.outcomes, envelope.texts), parts, strict=True))
        self.write(files)
        with self.writing() as db:
            if self._member_of(member, envelope.agent, envelope.team, envelope.step) != roster:
                raise Refused(409, "amended", f"{member!r} was amended in the meantime; send again")
            self.write(files)  # in case they were pruned in the meantime
            if found := self.arrival(envelope.step, member, "batch", db):
                return self._again(found, signed, envelope)
            late = self._lateness(envelope.step, member, db)
            digests = {"outcomes": envelope.outcomes, "texts": envelope.texts}
            content: Content = {"team": self.team.id, "agent": member, "step": envelope.step}
            content |= {"envelope": signed.digest, "late": late, **digests}
            receipt = self._arrive(db, "batch", late, signed, content, digests)
        self.close_if_due()
        return receipt

    def _arrive(
        self,
        db: Connection,
        kind: str,
        late: bool,
        signed: Signed,
        content: Content,
        digests: Content,
    ) -> Signed:
        """Store a batch or a skip; return the receipt with this content and the time."""
        now = self.clock()
        receipt = self.key.sign("receipt", {**content, "time": now})
        row = {"step": content["step"], "agent": content["agent"], "kind": kind, "late": late}
        row |= {"received": now, "record": _text(signed), "receipt": _text(receipt), **digests}
        db.execute(insert(t.arrivals).values(row))
        return receipt

    def skip(self, member: str, signed: Signed) -> Signed:
        """Store a signed skip of a step and return the receipt."""
        content = signed.content
        if set(content) != {"team", "agent", "step"} or type(content["step"]) is not int:
            raise Malformed("skip: the content must be team, agent and step")
        step = content["step"]
        roster = self._member_of(member, content["agent"], content["team"], step)
        keys = {roster.key, *self.team.keys(member, self.open)}  # a new key skips old steps, too
        if not any(signed.valid(key) for key in keys):
            raise Refused(403, "signature", f"the skip is not signed by {member!r}'s key")
        with self.writing() as db:
            if found := self.arrival(step, member, "skip", db):
                return t.decoded("receipt", found.receipt)
            if self.arrival(step, member, "batch", db):
                raise Refused(409, "published", f"step {step + 1} has a batch of {member!r}")
            fields = {**content, "skip": signed.digest}
            receipt = self._arrive(db, "skip", step < self.open, signed, fields, {})
        self.close_if_due()
        return receipt

    def _member_of(self, member: str, agent: Any, team: Any, step: int) -> Any:
        if agent != member or team != self.team.id:
            raise Refused(403, "author", "the record is of another member or another team")
        if not 0 <= step < self.charter.steps:
            raise Refused(409, "step", f"the team has steps 1 to {self.charter.steps}")
        if step > self.open:
            raise Refused(409, "early", f"step {step + 1} is not open, but {self.open + 1} is")
        found = self.team.roster(step).get(member)
        if found is None:
            raise Refused(403, "roster", f"{member!r} is not a member in step {step + 1}")
        return found

    def _again(self, found: Any, signed: Signed, envelope: Envelope) -> Signed:
        """The receipt of a stored batch, or a refusal and a proof if the new one differs."""
        stored = t.decoded("envelope", found.record)
        if Envelope.model_validate(stored.content).same == envelope.same:
            return t.decoded("receipt", found.receipt)
        record = canonical({"envelopes": [stored.plain(), signed.plain()], "kind": "equivocation"})
        row = {"digest": sha256(record), "step": found.step, "agent": found.agent}
        with self.writing() as db:
            mine = (t.proofs.c.agent == found.agent) & (t.proofs.c.step == found.step)
            if not self.rows(select(t.proofs.c.digest).where(mine), db):  # one is enough
                row |= {"found": self.clock(), "record": record.decode()}
                db.execute(insert(t.proofs).values(row))
        message = (
            f"another batch of step {envelope.step + 1} is stored; both envelopes are recorded"
        )
        raise Refused(409, "equivocation", message)

    def _check_counts(self, envelope: Envelope, level: str) -> None:
        """Check the numbers of rows against the charter."""
        charter = self.charter
        most = charter.prompts_per_step * charter.samples_per_prompt if level != "nothing" else 0
        texts = envelope.rows if level in ("successes", "all") else 0
        if envelope.rows > most or envelope.published > texts:
            message = f"publish = {level!r} allows {most} outcomes and {texts} texts in this batch"
            raise Refused(413, "rows", message)

    def _check_head(self, envelope: Envelope) -> None:
        """Check that the snapshot which the author has seen is one of this hub."""
        if envelope.head is None:
            return
        head = Signed.of("snapshot", envelope.head)
        if not head.valid(self.charter.hub):
            raise Refused(403, "head", "the envelope's head is not signed by this hub")
        step = head.content.get("step")
        known = self.snapshot_of(step) if type(step) is int else None
        if known is None or known.content != head.content:
            raise Refused(
                409,
                "fork",
                "the envelope names a snapshot that this hub does not have: it was restored from an "
                "old backup, or two hubs use one key",
            )

    def _lateness(self, step: int, member: str, db: Connection | None = None) -> bool:
        """Whether a new batch would be late; Refused if it comes too late."""
        skipped = self.arrival(step, member, "skip", db) is not None
        if step == self.open and not skipped:
            return False
        limit = self.charter.staleness
        if step == self.open:
            raise Refused(409, "skipped", f"step {step + 1} was skipped and is still open")
        if self.open - step > limit:
            raise Refused(409, "late", f"step {step + 1} is closed and staleness is {limit}")
        if self._revealed(step, member, db):
            raise Refused(409, "revealed", f"{member!r} has read step {step + 1} already")
        return True

    # ------------------------------------------------------------ closing

    def close_if_due(self) -> float | None:
        """Close the open step if all its members have arrived, or its deadline has passed. Return the
        seconds until the deadline; None if none is running."""
        closed = False
        try:
            with self.lock:
                while self.open < self.charter.steps:
                    with self.writing() as db:
                        here = t.arrivals.c.step == self.open
                        rows = self.rows(select(t.arrivals).where(here), db)
                        began = min((r.received for r in rows if r.kind == "batch"), default=None)
                        limit = self.charter.deadline
                        left = began + limit - self.clock() if began and limit else None
                        roster = self.team.roster(self.open)
                        missing = set(roster) - {r.agent for r in rows}
                        if (missing or not roster) and (left is None or left > 0):
                            return left
                        batches = {r.agent: r for r in rows if r.kind == "batch"}
                        snapshot = self._sign_snapshot(db, batches)
                    self.head, self.open, closed = snapshot, self.open + 1, True
            return None
        finally:
            if closed:
                self.prune()
                self.on_close()

    def _sign_snapshot(self, db: Connection, rows: Mapping[str, Any]) -> Signed:
        """Commit the snapshot of the open step with these batches."""
        content: Content = {
            "team": self.team.id,
            "step": self.open,
            "batches": {
                agent: {
                    "envelope": t.decoded("envelope", row.record).digest,
                    "outcomes": row.outcomes,
                    "texts": row.texts,
                }
                for agent, row in rows.items()
            },
            "previous": self.head.digest if self.head else self.team.id,
            "amendments": self.team.head,
        }
        signed = self.key.sign("snapshot", content)
        row = {"step": self.open, "closed": self.clock(), "record": _text(signed)}
        db.execute(insert(t.snapshots).values(row))
        return signed

    def amend(self, signed: Signed) -> None:
        """Append an amendment to the chain."""
        with self.lock:
            if signed.digest in {a.digest for a in self.team.chain}:
                return
            team = self.team.amended(signed)
            new = team.amendments[-1]
            if new.step < self.open:
                message = f"step {new.step + 1} is closed; the earliest possible is {self.open + 1}"
                raise Refused(409, "closed", message)
            if new.step >= self.charter.steps:
                raise Refused(409, "step", f"the team has steps 1 to {self.charter.steps}")
            if any(_same_rotate(new, a) and a.step >= self.open for a in self.team.effective):
                message = f"{new.member!r} has announced a new key already; wait for its step"
                raise Refused(409, "announced", message)
            with self.writing() as db:
                here = [self.arrival(self.open, new.member, kind, db) for kind in ("batch", "skip")]
                if new.step == self.open and any(here):
                    message = f"{new.member!r} has sent step {new.step + 1}; choose the next"
                    raise Refused(409, "arrived", message)
                db.execute(insert(t.amendments).values(number=new.number, record=_text(signed)))
            self.team = team  # not before the commit
        self.close_if_due()

    # ------------------------------------------------------------ reading

    def snapshot(self, member: str, step: int) -> Signed:
        """The snapshot of a closed step, for a member that has committed to the step."""
        self._committed(member, step)
        found = self.snapshot_of(step)
        assert found is not None
        return found

    def listing(self, member: str, step: int) -> list[Content]:
        """The envelopes of a closed step, also those of late batches."""
        self._reveal(member, step)
        here = (t.arrivals.c.step == step) & (t.arrivals.c.kind == "batch")
        rows = self.rows(select(t.arrivals).where(here).order_by(t.arrivals.c.agent))
        return [{"late": r.late, "envelope": t.decoded("envelope", r.record).plain()} for r in rows]

    def part(self, member: str, step: int, digest: str) -> Path:
        """The file of a part of a closed step, if the member may read it."""
        self._reveal(member, step)
        a = t.arrivals.c
        here = (a.step == step) & or_(a.outcomes == digest, a.texts == digest)
        rows = self.rows(select(t.arrivals).where(here))
        if not rows:
            raise Refused(404, "part", f"step {step + 1} has no part {digest[:16]}...")
        if not any(r.outcomes == digest or self._may_read(member, r.agent, step) for r in rows):
            message = f"{member!r} publishes less than {rows[0].agent!r} in step {step + 1}"
            raise Refused(403, "reciprocity", message)
        path = self.path(digest)
        if not path.exists():
            raise Refused(410, "gone", f"the hub keeps the batches of {self.keep_steps} steps")
        return path

    def _may_read(self, member: str, author: str, step: int) -> bool:
        """Whether reciprocity lets the member receive the author's texts."""
        if member == author or not self.charter.reciprocity:
            return True
        roster = self.team.roster(step)
        if member not in roster or self.arrival(step, member, "batch") is None:
            return False
        return receives_texts(roster[member].publish, roster[author].publish)

    def _committed(self, member: str, step: int) -> None:
        """Refused unless the step is closed and the member's batch or skip of it is stored. Steps
        before a member joined, or after it left, need neither."""
        if not 0 <= step < self.open:
            raise Refused(404, "open", f"step {step + 1} is not closed")
        if member in self.team.roster(step) and not any(
            self.arrival(step, member, kind) for kind in ("batch", "skip")
        ):
            raise Refused(403, "commit", f"publish or skip step {step + 1} before you read it")

    def _reveal(self, member: str, step: int) -> None:
        """Like `_committed`, for the members of the step only, and record that a member without a batch
        reads the step."""
        self._committed(member, step)
        if member not in self.team.roster(step):
            raise Refused(403, "roster", f"{member!r} is not a member in step {step + 1}")
        if not self.arrival(step, member, "batch"):
            with self.writing() as db:
                if not self.arrival(step, member, "batch", db) and not self._revealed(
                    step, member, db
                ):
                    db.execute(insert(t.reveals).values(step=step, agent=member))

    def _revealed(self, step: int, member: str, db: Connection | None) -> bool:
        r = t.reveals.c
        return bool(self.rows(select(r.step).where(r.step == step, r.agent == member), db))


def _same_rotate(one: Amended, two: Amended) -> bool:
    """Whether both are rotates that the same member signed."""
    both = {(a.kind, a.signer, a.member) for a in (one, two)}
    return both == {("rotate", "member", one.member)}


def _text(signed: Signed) -> str:
    return signed.encode().decode()
