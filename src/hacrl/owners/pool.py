"""The pool of a member: the batches of all members, copied from the hub into the run directory.

`HubPool` is an ordinary pool (store/pool.py) that also sends the member's batches to the hub, and gets
its snapshots from there. After `close` a step is complete in RUN/pool: training, `hacrl resume` and
the commands that read runs need no hub. A row whose text was not published, or not received, is there
as an outcome (Finish.WITHHELD).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.owners.batch import Batch, Envelope, read_envelope
from hacrl.owners.client import HubClient
from hacrl.owners.connection import HubRefused
from hacrl.owners.signing import Malformed, Signed
from hacrl.store.codec import TRAJECTORY, CodecError
from hacrl.store.files import write_atomic
from hacrl.store.pool import Pool
from hacrl.trust import Level
from hacrl.trust.publish import receives_texts
from hacrl.types import Finish, Trajectory

TOO_LATE = ("late", "skipped", "revealed", "roster")
"""Refusals of a batch after which the member skips the step."""


class HubPool(Pool):
    """The pool of one member.

    Example: pool = HubPool(run.pool_path, client)
    """

    def __init__(self, folder: Path, client: HubClient) -> None:
        super().__init__(folder)
        self.client = client
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
        state = self._state()
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

    def _state(self) -> dict[str, Any]:
        """The hub's state, after its new amendments were fetched."""
        state = self.client.state()
        if state["amendments"] != self.client.team.head:
            self.client.refresh()
        return state

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
            try:
                self.client.put(self._signed(step, trajectories))
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
            agent = listed.envelope.agent
            if listed.late and agent != self.client.name and not self.whole(step, agent):
                try:
                    self.store_lines(step, agent, self._lines_of(listed.envelope))
                except HubRefused as refused:
                    if refused.code != "gone":  # the hub removed it: this member is behind
                        raise
        own = {*self.members(step), self.client.name}
        return {n: list(self.rows(n, step)) for n in self.arrived(step) if n not in own}

    def _signed(self, step: int, trajectories: Sequence[Trajectory]) -> Batch:
        """The batch with the envelope that was signed first, so that it is sent with the same bytes. It
        is signed again if the hub cannot have accepted it: the member has another key or level now."""
        client, path = self.client, self._envelope(step)
        newest = self._state()["newest"]
        member = client.team.roster(step).get(client.name)  # it may join again with another level
        if member is None:
            raise HubRefused("roster", f"{client.name!r} is not a member in step {step + 1}")
        author = (client.key, client.team.id, client.name)
        built = (
            Batch.build(*author, step, trajectories, level, client.head)
            for level in (member.publish, *get_args(Level))
        )
        batch = next(built)  # at the present level
        if path.exists():
            signed = Signed.decode("envelope", path.read_bytes())
            same = read_envelope(signed).same
            first = next(
                (b for b in (batch, *built) if read_envelope(b.envelope).same == same), None
            )
            if first is None:
                raise UserError(
                    f"{path}: a different batch of step {step + 1} was already signed, and a member may "
                    "publish only one. Restore the journal of the run"
                )
            known = client.sent(step) or (newest is not None and newest >= step)
            if known or (first is batch and signed.valid(member.key)):
                return Batch(signed, first.outcomes, first.texts)
        write_atomic(path, batch.envelope.encode())
        return batch

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
                if refused.code != "reciprocity" or self._receives(envelope.agent, step):
                    raise
        return b"".join(line + b"\n" for line in merged(outcomes, texts, self.client.note))

    def _receives(self, author: str, step: int) -> bool:
        """Whether this member must receive the author's texts."""
        charter, roster = self.client.team.charter, self.client.team.roster(step)
        own, other = (roster[name].publish for name in (self.client.name, author))
        return self.client.sent(step) and (not charter.reciprocity or receives_texts(own, other))

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
