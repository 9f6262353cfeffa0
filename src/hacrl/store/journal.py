"""An agent's own rollouts on disk, before anyone else sees them.

One file a step, written whole or not at all. After a restart the agent replays it and samples
nothing that is in it. A verdict once written is final, so a step is never written anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.codec import ROLLOUT, CodecError
from hacrl.store.files import sweep, write_atomic
from hacrl.types import Finish, Rollout

SCHEMA = 1
_NAME = re.compile(r"step-(\d{6,})\.jsonl")


class Journal:
    """The journal of one agent.

    A file is a header line {"schema", "agent", "step", "count", "sha256" of the rest}, a line of
    facts about the step, then one rollout a line, in the order in which they were given.

    Example: Journal(Path("runs/team/journal/ant")).write(3, rollouts, {"agreement/max_gap": 2e-7})
    """

    def __init__(self, folder: Path, agent: str | None = None) -> None:
        self.folder = folder
        self.agent = folder.name if agent is None else agent
        self._swept = False

    def write(
        self, step: int, rollouts: Sequence[Rollout], facts: Mapping[str, float] | None = None
    ) -> None:
        """Journal a step. The same again is harmless; anything else for that step is refused.

        `facts` are numbers measured while sampling that a replay could not measure again.
        """
        path = self.path(step)
        content = self._content(step, rollouts, dict(facts or {}))
        if path.exists():
            if path.read_bytes() != content:
                raise UserError(
                    f"{path}: step {step} is journalled already, with other rollouts; a journalled "
                    "step is final. Resume the run that wrote it, or use another run directory"
                )
            return
        if not self._swept:
            sweep(self.folder)
            self._swept = True
        write_atomic(path, content)

    def read(self, step: int) -> tuple[list[Rollout], dict[str, float]] | None:
        """The rollouts and facts of a step, or None if it was not journalled."""
        path = self.path(step)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        head, _, rest = data.partition(b"\n")
        header = self._header(path, head)
        for field, wanted in (("schema", SCHEMA), ("agent", self.agent), ("step", step)):
            if header[field] != wanted:
                raise _bad(path, 1, f"field {field}: {header[field]!r}, expected {wanted!r}")
        lines = rest.split(b"\n")
        torn = lines.pop()
        if torn or len(lines) != header["count"] + 1:
            found = max(0, len(lines) - 1)
            raise _bad(path, 1, f"the header counts {header['count']} rollouts, found {found}")
        if hashlib.sha256(rest).hexdigest() != header["sha256"]:
            raise _bad(path, 1, "field sha256: not that of the lines below")
        facts = _object(path, 2, lines[0])
        return [_rollout(path, number, line) for number, line in enumerate(lines[1:], 3)], facts

    def steps(self) -> list[int]:
        """The journalled steps, ascending."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.jsonl"

    def _content(self, step: int, rollouts: Sequence[Rollout], facts: dict[str, float]) -> bytes:
        lines, seen = [json.dumps(facts, allow_nan=False, sort_keys=True).encode()], set()
        for rollout in rollouts:
            key = (rollout.problem_id, rollout.index)
            place = f"journal of {self.agent!r}, step {step}, problem {key[0]!r}, index {key[1]}"
            if rollout.step != step or key in seen:
                reason = "is there twice" if key in seen else f"is of step {rollout.step}"
                raise ValueError(f"{place}: {reason}")
            if rollout.verdict is None and rollout.completion.finish != Finish.NOT_ATTEMPTED:
                raise ValueError(f"{place}: has no verdict, and could never get one afterwards")
            seen.add(key)
            try:
                lines.append(ROLLOUT.encode(rollout))
            except CodecError as error:
                raise UserError(f"{place}: {error}") from error
        rest = b"".join(line + b"\n" for line in lines)
        header = {
            "schema": SCHEMA,
            "agent": self.agent,
            "step": step,
            "count": len(rollouts),
            "sha256": hashlib.sha256(rest).hexdigest(),
        }
        return json.dumps(header).encode() + b"\n" + rest

    def _header(self, path: Path, line: bytes) -> dict[str, Any]:
        header = _object(path, 1, line)
        if set(header) != {"schema", "agent", "step", "count", "sha256"}:
            raise _bad(path, 1, f"not a journal header: {line[:80]!r}")
        return header


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise _bad(path, number, f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _bad(path, number, f"not a JSON object: {line[:80]!r}")
    return found


def _rollout(path: Path, number: int, line: bytes) -> Rollout:
    try:
        return ROLLOUT.decode(line)
    except CodecError as error:
        raise _bad(path, number, str(error)) from error


def _bad(path: Path, line: int, reason: str) -> UserError:
    return UserError(
        f"{path}, line {line}: {reason}. The file was cut or changed outside hacrl: put it "
        "back, or start the run anew"
    )
