"""The journal: an agent's rollouts on disk, written before they are published.

One file per step, complete or absent. After a restart the agent reads a journalled step and samples
nothing again. A journalled step is final and never rewritten.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.codec import ROLLOUT, CodecError
from hacrl.store.files import changed, steps_in, write_atomic
from hacrl.store.rows import read_object, write_object
from hacrl.types import Finish, Rollout

SCHEMA = 2

WAY_OUT = (
    "Restore the file from a backup, or delete it and run `hacrl resume RUN`: the step is sampled "
    "again with the same random numbers"
)


class Journal:
    """The journal of one agent.

    The first line of a file is a header {"schema", "agent", "step", "sha256" of the rest},
    the second holds facts about the step, and each further line one rollout, in the given order.

    Example: Journal(Path("runs/team/journal/ant")).write(3, rollouts, {"agreement/max_gap": 2e-7})
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.agent = folder, folder.name

    def write(
        self, step: int, rollouts: Sequence[Rollout], facts: Mapping[str, float] | None = None
    ) -> None:
        """Write a step. Writing the same again changes nothing; anything else is a UserError. `facts`
        are numbers measured while sampling, which a replay cannot measure again."""
        path = self.path(step)
        content = self._content(step, rollouts, dict(facts or {}))
        if not path.exists():
            write_atomic(path, content)
        elif path.read_bytes() != content:
            raise UserError(
                f"{path}: step {step + 1} is already in the journal, with different rollouts. A "
                "stored step is final: resume the run that wrote it, or use another run directory"
            )

    def read(self, step: int, way: str = WAY_OUT) -> tuple[list[Rollout], dict[str, float]] | None:
        """Return the rollouts and facts of a step, or None if it is not journalled. If the file is
        damaged, a UserError names the `way` out."""
        path = self.path(step)
        try:
            head, _, rest = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        if head != self._header(step, rest):
            reason = "the content, agent, step or version is not that of line 1"
            raise changed(path, reason, way)
        facts, *lines = rest.split(b"\n")[:-1]
        try:
            return [ROLLOUT.decode(line) for line in lines], json.loads(facts)
        except CodecError as error:
            raise changed(path, str(error), way) from error

    def steps(self) -> list[int]:
        """Return the journalled steps, ascending."""
        return steps_in(self.folder, ".jsonl")

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.jsonl"

    def _header(self, step: int, rest: bytes) -> bytes:
        digest = hashlib.sha256(rest).hexdigest()
        header = {"schema": SCHEMA, "agent": self.agent, "step": step, "sha256": digest}
        return json.dumps(header).encode()

    def _content(self, step: int, rollouts: Sequence[Rollout], facts: dict[str, float]) -> bytes:
        lines, seen = [json.dumps(facts, allow_nan=False, sort_keys=True).encode()], set()
        for rollout in rollouts:
            key = (rollout.problem_id, rollout.index)
            place = (
                f"journal of {self.agent!r}, step {step + 1}, problem {key[0]!r}, index {key[1]}"
            )
            if rollout.step != step or key in seen:
                reason = "is given twice" if key in seen else f"is of step {rollout.step + 1}"
                raise ValueError(f"{place}: {reason}")
            if rollout.verdict is None and rollout.completion.finish != Finish.NOT_ATTEMPTED:
                raise ValueError(f"{place}: has no verdict; judge rollouts before journalling them")
            seen.add(key)
            try:
                lines.append(ROLLOUT.encode(rollout))
            except CodecError as error:
                raise UserError(f"{place}: {error}") from error
        rest = b"".join(line + b"\n" for line in lines)
        return self._header(step, rest) + b"\n" + rest


class LearnerJournal:
    """What a learner decided about its peers' batches, written before it is used: one file per kind and
    step, in the folder of the rollouts. A file is final and never rewritten.

    Example: LearnerJournal(Path("runs/team/journal/ant")).write("verdicts", 3, digest, {"rows": [...]})
    """

    way = (
        "Restore the file from a backup, or delete it and run `hacrl resume RUN`: the texts of the "
        "step are judged again"
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, kind: str, step: int, digest: str, content: Mapping[str, Any]) -> None:
        """Write the file of a step, which the snapshot with this digest belongs to."""
        write_object(self.path(kind, step), {"step": step, "snapshot": digest, **content})

    def read(self, kind: str, step: int, digest: str) -> dict[str, Any] | None:
        """Return the content, None if there is no such file. UserError if it is of another snapshot."""
        path = self.path(kind, step)
        if not path.is_file():
            return None
        found = read_object(path, self.way)
        if (found.pop("step"), found.pop("snapshot")) != (step, digest):
            raise changed(path, "it belongs to another snapshot than the pool's", self.way)
        return found

    def newest(self, kind: str, before: int) -> int | None:
        """Return the newest step before `before` that has a file of this kind."""
        steps = (int(p.stem.removeprefix(f"{kind}-")) for p in self.folder.glob(f"{kind}-*.json"))
        return max((step for step in steps if step < before), default=None)

    def path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}-{step:06d}.json"
