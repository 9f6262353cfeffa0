"""The pool of a member: the batches of all members, copied from the hub into the run directory.

`HubPool` is an ordinary pool (store/pool.py) that also sends the member's batches to the hub, and gets
its snapshots from there. After `close` a step is complete in RUN/pool: training, `hacrl resume` and
the commands that read runs need no hub. A row whose text was not published, or not received, is there
as an outcome (Finish.WITHHELD).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.owners.batch import Batch, Envelope
from hacrl.owners.client import HubClient
from hacrl.owners.connection import HubRefused
from hacrl.owners.signing import Malformed, Signed
from hacrl.store.codec import TRAJECTORY, CodecError
from hacrl.store.files import write_atomic
from hacrl.store.pool import Pool
from hacrl.trust import Level
from hacrl.types import Finish, Trajectory

TOO_LATE = ("late", "skipped", "revealed", "roster")
"""Refusals of a batch after which the member skips the step."""


class HubPool(Pool):
    """The pool of one member.

    Example: pool = HubPool(run.pool_path, client, "all")
    """

    def __init__(self, folder: Path, client: HubClient, level: Level) -> None:
        super().__init__(folder)
        self.client, self.level = client, level
        self._way = "start `hacrl join` again: it is copied from the hub again"
        self._away: dict[int, bool] = {}

    # ------------------------------------------------------------ the team

    def is_away(self, step: int) -> bool:
        """Whether the member takes no part in the step: it is not in the team then, or the step was
        closed before the member could begin it. Waits until the step before is closed."""
        if step < 0:
            return False
        if step not in self._away:
            self._away[step] = self._decide(step)
        return self._away[step]

    def _decide(self, step: int) -> bool:
        client = self.client
        if self.closed(step):
            return not self.members(step)
        if self._envelope(step).exists() or client.known(step):
            return not self._envelope(step).exists()
        if step and not self.closed(step - 1):
            self.close(step - 1, ())
        state = client.state()
        if state["amendments"] != client.team.head:
            client.refresh()
        mine = client.team.roster(step).get(client.name)
        if mine is None or mine.key != client.key.public:
            return True
        if state["newest"] is not None and state["newest"] >= step:
            raise UserError(
                f"the hub has batches of {client.name!r} up to step {state['newest'] + 1} that "
                f"{self.folder.parent} does not have. Use the run directory that sent them; if it is "
                "lost, make a new key and ask the founder for an amendment (rotate)"
            )
        return bool(state["open"] > step)

    def team(self, config: Config, step: int) -> Config:
        """The config with the members of the step as agents."""
        header, known = self.client.known(step), self.client.team
        known = known.until(header.content["amendments"]) if header else known
        mine = config.agents[0]
        found = {
            name: AgentConfig(name=name, model="another owner's", learn=False, publish=peer.publish)
            for name, peer in known.roster(step).items()
        }
        return config.model_copy(update={"agents": [*(found | {mine.name: mine}).values()]})

    # ------------------------------------------------------------ a step

    def publish(self, step: int, agent: str, trajectories: Sequence[Trajectory]) -> str:
        """Store the batch here and send it to the hub. If the step was closed without it and it is too
        late, the step is skipped: the member learns from the others' batches."""
        digest = super().publish(step, agent, trajectories)
        if not self.closed(step):
            batch = self._signed(step, trajectories)
            try:
                self.client.put(batch)
            except HubRefused as refused:
                if refused.code not in TOO_LATE:
                    raise
                self.client.note(f"step {step + 1}: {refused}. The step is skipped")
                self._skip(step)
        return digest

    def close(self, step: int, members: Sequence[str]) -> None:
        """Wait until the hub has closed the step, and copy its batches. The hub decides who is in it:
        `members` is not used. The member's own late batch counts for itself."""
        if self.closed(step):
            return
        client = self.client
        if self.is_away(step):
            self._skip(step)
        began = time.monotonic()
        header = client.snapshot(step)
        self.waited += time.monotonic() - began
        roster = client.team.until(header.content["amendments"]).roster(step)
        if client.name not in roster:
            self._away[step] = True
        if self._away.get(step):
            return super().close(step, ())
        for listed in client.envelopes(step):
            if not listed.late and listed.envelope.agent != client.name:
                self.store_lines(step, listed.envelope.agent, self._lines_of(listed.envelope))
        here = [n for n in roster if n in header.content["batches"]]
        if missing := [name for name in here if not (self._step(step) / name).is_dir()]:
            raise UserError(
                f"{client.url}: the hub does not have the batches of {', '.join(missing)} that its "
                f"snapshot of step {step + 1} names"
            )
        if client.sent(step) and client.name not in here:
            here.append(client.name)  # late
        self._away[step] = not here
        super().close(step, here)

    def _skip(self, step: int) -> None:
        """Send a skip, so that the hub shows the step. Not needed by who is not in the team then."""
        try:
            self.client.skip(step)
        except HubRefused as refused:
            if refused.code not in ("roster", "published", "early"):
                raise

    def late(self, step: int) -> dict[str, list[Trajectory]]:
        """The late batches of a closed step, by author, copied into the run directory. Rows that cannot
        be read are left out."""
        for listed in self.client.envelopes(step):
            if listed.late and (agent := listed.envelope.agent) != self.client.name:
                self.store_lines(step, agent, self._lines_of(listed.envelope))
        own = {*self.members(step), self.client.name}
        return {n: list(self.rows(n, step)) for n in self.arrived(step) if n not in own}

    def _signed(self, step: int, trajectories: Sequence[Trajectory]) -> Batch:
        """The batch with the envelope that was signed first, so that it is sent with the same bytes."""
        client, path = self.client, self._envelope(step)
        author = (client.key, client.team.id, client.name)
        member = client.team.roster(step).get(client.name)  # it may join again with another level
        level = member.publish if member else self.level
        batch = Batch.build(*author, step, trajectories, level, client.head)
        if not path.exists():
            write_atomic(path, batch.envelope.encode())
            return batch
        signed = Signed.decode("envelope", path.read_bytes())
        first, now = (Envelope.model_validate(e.content) for e in (signed, batch.envelope))
        if first.same != now.same:
            raise UserError(
                f"{path}: a different batch of step {step + 1} was already signed, and a member may "
                "publish only one. Restore the journal of the run"
            )
        return Batch(signed, batch.outcomes, batch.texts)

    def _envelope(self, step: int) -> Path:
        """The envelope that this member signed for a step."""
        return self.client.folder / "envelopes" / f"step-{step:06d}.json"

    def _lines_of(self, envelope: Envelope) -> bytes:
        """The rows of a batch: texts where they are published and received, else outcomes."""
        step = envelope.step
        outcomes, texts = self._part(step, envelope.outcomes, envelope.rows), list[bytes]()
        if envelope.published:
            try:
                texts = self._part(step, envelope.texts, envelope.published)
            except HubRefused as refused:
                if refused.code != "reciprocity":
                    raise
        return b"".join(line + b"\n" for line in merged(outcomes, texts, self.client.note))

    def _part(self, step: int, digest: str, rows: int) -> list[bytes]:
        """The lines of a part; Malformed unless there are as many as its envelope says."""
        lines = self.client.part(step, digest).split(b"\n")[:-1]
        if len(lines) != rows:
            raise Malformed(f"a part of step {step + 1} has {len(lines)} rows, its envelope {rows}")
        return lines


def merged(
    outcomes: Sequence[bytes], texts: Sequence[bytes], note: Callable[[str], None]
) -> Iterator[bytes]:
    """The lines of the outcomes, each replaced by the text with the same problem, index and verdict. A
    text without such an outcome is left out. Lines that cannot be read stay; learners count them."""
    shown: dict[tuple[object, ...], bytes] = {}
    for line in texts:
        if row := _decoded(line):
            shown.setdefault(_claim(row), line)
    used = 0
    for line in outcomes:
        row = _decoded(line)
        text = shown.pop(_claim(row), None) if row and row.finish is Finish.WITHHELD else None
        used += text is not None
        yield text or line
    if used < len(texts):
        note(f"{len(texts) - used} published texts do not match their outcomes and are left out")


def _claim(row: Trajectory) -> tuple[object, ...]:
    verdict = row.verdict
    return (*row.key, verdict and (verdict.reward, verdict.status))


def _decoded(line: bytes) -> Trajectory | None:
    try:
        return TRAJECTORY.decode(line)
    except CodecError:
        return None
