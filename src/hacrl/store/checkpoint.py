"""Checkpoints of one agent: weights, optimizer and a little plain state, whole or not at all.

    <run>/checkpoints/<agent>/
      best.json                     held-out scores of the best step
      step-000010/
        model.safetensors  optimizer.safetensors  state.json
        manifest.json               size and sha256 of the three; not whole without it

Tensors are safetensors and the rest is JSON: nothing that is loaded can execute code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hacrl.errors import UserError
from hacrl.store.files import full_disk_error, remove_whole, sweep, whole_folder, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_CONTENT = (_MODEL, _OPTIMIZER, _STATE)
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")

Report = Callable[[str], None]


class CorruptCheckpoint(UserError):
    """A checkpoint that is not what was written. Names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """All that an agent needs to go on from a step.

    Example: Checkpoint(step=10, model={"embed": tensor}, optimizer={"embed.exp_avg": tensor},
             state={"skipped_updates": 0})
    """

    step: int
    """Steps learned when it was taken."""
    model: dict[str, Tensor]
    """Distinct tensors: a tied one under one name only."""
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    """Plain JSON: what it says is what comes back."""
    pool_position: int | None = None
    """Next step to gather; `step` when not given. Always a number after loading."""


class Checkpoints:
    """The checkpoints of one agent: the newest `keep` and the best one stay.

    A team saves for every agent first and prunes afterwards, so that at every moment there is a
    step that is whole for all. The agent is the folder's only writer; reading beside it is safe.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise UserError(f"keep = {keep}: at least one checkpoint must be kept")
        self.folder = folder
        self.keep = keep
        self._swept = False
        self._saved: int | None = None

    def save(self, snapshot: Checkpoint) -> Path:
        """Write a checkpoint, whole or not at all, replacing one of the same step."""
        state = _state_text(snapshot)
        for part in (snapshot.model, snapshot.optimizer):
            _refuse_shared(part)
        self.sweep()
        place = self.path(snapshot.step)
        with whole_folder(place) as new:
            _save_tensors(new / _MODEL, snapshot.model, place)
            _save_tensors(new / _OPTIMIZER, snapshot.optimizer, place)
            (new / _STATE).write_text(state, encoding="utf-8")
            manifest = {"schema": SCHEMA, "files": {name: _facts(new / name) for name in _CONTENT}}
            (new / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        self._saved = snapshot.step
        return place

    def prune(self, also: Collection[int] = ()) -> None:
        """Remove all but the newest `keep`, the best one and those of `also`.

        Steps newer than the one just saved were left by a run that was resumed from before them:
        they are not of this run's history, and go too.
        """
        steps = [step for step in self.steps() if self._saved is None or step <= self._saved]
        best = self._best_of(steps)
        kept = {*steps[-self.keep :], *also}
        if best is not None:
            kept.add(best[0])
            self._write_marks({best[0]: best[1]})
        for step in self._folders():
            if step not in kept:
                remove_whole(self.path(step))

    def steps(self) -> list[int]:
        """The whole checkpoints, newest last. Their content is not verified here."""
        return [step for step in self._folders() if (self.path(step) / _MANIFEST).is_file()]

    def load(self, step: int) -> Checkpoint:
        """Verify a checkpoint and read it, on the CPU."""
        self.verify(step)
        place = self.path(step)
        content = _json(place / _STATE)
        if content.get("schema") != SCHEMA or content.get("step") != step:
            raise _corrupt(place / _STATE, "is of another step or version")
        return Checkpoint(
            step=step,
            model=_load_tensors(place / _MODEL),
            optimizer=_load_tensors(place / _OPTIMIZER),
            state=content["state"],
            pool_position=content["pool_position"],
        )

    def verify(self, step: int) -> None:
        """Raise CorruptCheckpoint unless every file is, byte for byte, what was written."""
        place = self.path(step)
        manifest = _json(place / _MANIFEST)
        files = manifest.get("files")
        if manifest.get("schema") != SCHEMA or not isinstance(files, dict):
            raise _corrupt(place / _MANIFEST, "is not a manifest of this version")
        if set(files) != set(_CONTENT):
            raise _corrupt(place / _MANIFEST, f"lists other files than {', '.join(_CONTENT)}")
        for name in _CONTENT:
            path = place / name
            if not path.is_file():
                raise _corrupt(path, "is missing")
            if _facts(path) != files[name]:
                raise _corrupt(path, "is not what was written (size or sha256 differ)")

    def newest_whole(self, report: Report, among: Collection[int] | None = None) -> int | None:
        """The newest step (of `among`) that verifies. Says in one sentence what was passed over and
        why."""
        steps = [step for step in self._folders() if among is None or step in among]
        return _newest({self.folder.name: self}, steps, report)

    def mark_best(self, step: int, score: float) -> bool:
        """Note the held-out score of a step if it is the best so far; say whether it is.

        May come before the step is saved: until then the old best one stays marked as well. Marks
        of this step and later ones are forgotten: they are of a run that was resumed from before.
        """
        if not math.isfinite(score):
            raise ValueError(f"score of step {step} in {self.folder}: {score} is not finite")
        marks = {at: old for at, old in self._marks().items() if at < step}
        saved = self.steps()
        best = all(score > old for at, old in marks.items() if at in saved)
        if best:
            marks[step] = float(score)
        self._write_marks(marks)
        return best

    def best(self) -> tuple[int, float] | None:
        """(step, score) of the best saved one, or None when there is none."""
        return self._best_of(self.steps())

    def sweep(self) -> None:
        """Clear away what a kill left behind: once, before this object's first write."""
        if not self._swept:
            sweep(self.folder)
            self._swept = True

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _folders(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _best_of(self, steps: list[int]) -> tuple[int, float] | None:
        marks = [(step, score) for step, score in self._marks().items() if step in steps]
        return max(marks, key=lambda mark: (mark[1], -mark[0]), default=None)

    def _marks(self) -> dict[int, float]:
        path = self.folder / "best.json"
        if not path.is_file():
            return {}
        scores = _json(path).get("scores")
        if not isinstance(scores, dict) or not all(
            step.isdecimal() and type(score) is float for step, score in scores.items()
        ):
            raise _corrupt(path, "does not hold a score for a step; delete it to go on without")
        return {int(step): score for step, score in scores.items()}

    def _write_marks(self, marks: Mapping[int, float]) -> None:
        if marks != self._marks():
            content = {"schema": SCHEMA, "scores": {str(step): marks[step] for step in marks}}
            write_atomic(self.folder / "best.json", json.dumps(content))


def newest_common(all: Mapping[str, Checkpoints], report: Report) -> int | None:
    """The newest step of which every agent has a whole checkpoint: where a resumed run goes on.

    For the run's only writer: it also clears away what a kill left behind.
    """
    for checkpoints in all.values():
        checkpoints.sweep()
    common = set.intersection(*(set(c._folders()) for c in all.values())) if all else set()
    return _newest(all, sorted(common), report)


def _newest(all: Mapping[str, Checkpoints], steps: list[int], report: Report) -> int | None:
    """The newest of `steps` that verifies for all agents."""
    broken: list[str] = []
    found = None
    for step in reversed(steps):
        try:
            for checkpoints in all.values():
                checkpoints.verify(step)
        except CorruptCheckpoint as error:
            broken.append(f"checkpoint of step {step} is corrupted ({error})")
            continue
        found = step
        break
    if broken:
        use = "no older one is left" if found is None else f"using step {found} instead"
        report("; ".join(broken) + f": {use}")
    return found


def _corrupt(path: Path, reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} {reason}")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _corrupt(path, "is missing") from error
    except ValueError as error:
        raise _corrupt(path, f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise _corrupt(path, "is not a JSON object")
    return content


def _facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {
            "size": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _state_text(snapshot: Checkpoint) -> str:
    position = snapshot.step if snapshot.pool_position is None else snapshot.pool_position
    content = {
        "schema": SCHEMA,
        "step": snapshot.step,
        "pool_position": position,
        "state": snapshot.state,
    }
    try:
        text = json.dumps(content, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state of step {snapshot.step} is not plain JSON: {error}") from error
    if json.loads(text) != content:  # tuples and numbers as keys come back as something else
        raise ValueError(f"state of step {snapshot.step} is not plain JSON: {snapshot.state!r}")
    return text


def _save_tensors(path: Path, tensors: Mapping[str, Tensor], place: Path) -> None:
    from safetensors.torch import save_file  # imports torch

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path)
    except SafetensorError as error:
        # The writer of safetensors is not Python: its system errors come as text.
        if any(f"os error {number})" in str(error) for number in (27, 28, 122)):
            raise full_disk_error(place, str(error)) from error
        raise


def _load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file  # imports torch

    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise _corrupt(path, f"is not safetensors ({error})") from error


def _refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """Two names for one piece of memory would be two tensors after loading: training would part."""
    spans: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        ways = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((count - 1) * stride for count, stride in ways)
        start = int(tensor.storage_offset() * tensor.element_size())
        end = start + int((last + 1) * tensor.element_size())
        key = (str(tensor.device), tensor.untyped_storage().data_ptr())
        spans.setdefault(key, []).append((start, end, name))
    for group in spans.values():
        group.sort()
        for (_, end, name), (start, _, other) in pairwise(group):
            if start < end:
                raise ValueError(
                    f"tensors {name!r} and {other!r} share memory (tied weights): give the "
                    "checkpoint one of them"
                )
