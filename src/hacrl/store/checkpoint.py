"""Checkpoints of one agent: weights, optimizer and some plain state, complete or absent.

    RUN/checkpoints/AGENT/
      best.json                     {step: held-out score} of the best step
      step-000010/
        model.safetensors  optimizer.safetensors  state.json
        manifest.json               sha256 of the three, and the digest of the run's inputs

Tensors are stored as safetensors and everything else as JSON: loading executes no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hacrl.errors import UserError
from hacrl.store.files import remove_whole, steps_in, sweep, whole_folder
from hacrl.store.rows import read_object, write_object

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 2
ASIDE = "aside-"  # before the name of a checkpoint that does not count any more
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_FILES = (_MODEL, _OPTIMIZER, _STATE)
_MANIFEST = "manifest.json"

Report = Callable[[str], None]


class CorruptCheckpoint(UserError):
    """A checkpoint whose files are not those that were written. Names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything an agent needs to continue from a step.

    Example: Checkpoint(step=10, model={"embed": tensor}, optimizer={"embed.exp_avg": tensor},
             state={"skipped_updates": 0})
    """

    step: int  # number of steps the agent has learned
    model: dict[str, Tensor]  # distinct tensors: a tied one under one name only
    optimizer: dict[str, Tensor]
    state: dict[str, Any]  # plain JSON


class Checkpoints:
    """The checkpoints of one agent: the newest `keep` and the best one are kept. `fingerprint` is the
    digest of the run's inputs, for checkpoints to be saved.

    A team saves for every agent first and prunes afterwards, so that there always is a step that is
    complete for all. The agent is the folder's only writer; others may read at the same time.
    """

    def __init__(self, folder: Path, keep: int, fingerprint: str | None = None) -> None:
        self.folder, self.keep, self.fingerprint = folder, keep, fingerprint

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, replacing one of the same step; return its folder."""
        state = json.dumps(checkpoint.state, allow_nan=False, indent=1)
        manifest = {"schema": SCHEMA, "step": checkpoint.step, "fingerprint": self.fingerprint}
        sweep(self.folder)
        place = self.path(checkpoint.step)
        with whole_folder(place) as new:
            _save_tensors(new / _MODEL, checkpoint.model)
            _save_tensors(new / _OPTIMIZER, checkpoint.optimizer)
            (new / _STATE).write_text(state, encoding="utf-8")
            manifest |= {name: sha256(new / name) for name in _FILES}
            (new / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        return place

    def load(self, step: int) -> Checkpoint:
        """Verify a checkpoint and read it, on the CPU."""
        self.verify(step)
        place = self.path(step)
        model, optimizer = _load_tensors(place / _MODEL), _load_tensors(place / _OPTIMIZER)
        return Checkpoint(step, model, optimizer, _json(place / _STATE))

    def verify(self, step: int) -> None:
        """Raise CorruptCheckpoint unless every file has the sha256 of the manifest."""
        place = self.path(step)
        manifest = _json(place / _MANIFEST)
        for path in (place / name for name in _FILES):
            if not path.is_file():
                raise CorruptCheckpoint(f"{path} is missing")
            if manifest.pop(path.name, None) != sha256(path):
                raise CorruptCheckpoint(f"{path} was changed (its sha256 is not in the manifest)")
        manifest.pop("fingerprint", None)
        if manifest != {"schema": SCHEMA, "step": step}:
            raise CorruptCheckpoint(f"{place / _MANIFEST} is of another step or version")

    def prune(self, also: Collection[int] = ()) -> None:
        """Remove all but the newest `keep`, the best one and those of `also`."""
        steps = self.steps()
        kept = {*steps[-self.keep :], *also}
        if best := self.best(steps):
            kept.add(best[0])
            start = {step: score for step, score in self._scores().items() if step == 0}
            self._write_scores({**start, **dict([best])})
        for step in steps_in(self.folder):
            if step not in kept:
                remove_whole(self.path(step))
        for path in self.folder.glob(f"{ASIDE}*"):
            remove_whole(path)

    def set_aside(self, after: int) -> list[Path]:
        """Rename checkpoints of later steps, so that they do not count. `prune` removes them."""
        moved = []
        for step in steps_in(self.folder):
            if step > after:
                place = self.path(step).with_name(f"{ASIDE}{self.path(step).name}")
                if place.exists():
                    remove_whole(place)
                moved.append(self.path(step).rename(place))
        return moved

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending, without verifying their content."""
        return [step for step in steps_in(self.folder) if (self.path(step) / _MANIFEST).is_file()]

    def newest_whole(self, report: Report, among: Collection[int] | None = None) -> int | None:
        """Return the newest step (of `among`) that verifies; report those that do not."""
        return newest_common({self.folder.name: self}, report, among)

    def mark_best(self, step: int, score: float) -> bool:
        """Record the held-out score of a step if it is the best so far; return whether it is.

        Step 0 is the model before training, which has no checkpoint. Until the step is saved, the
        previous best one is kept too. Scores of this and later steps are dropped: they belong to a run
        that was resumed from an earlier step. A score that is not finite is never the best.
        """
        if not isfinite(score):
            return False
        scores = {at: old for at, old in self._scores().items() if at < step}
        saved = [0, *self.steps()]
        best = all(score > old for at, old in scores.items() if at in saved)
        self._write_scores({**scores, step: float(score)} if best else scores)
        return best

    def best(self, among: Collection[int] | None = None) -> tuple[int, float] | None:
        """Return (step, score) of the best saved checkpoint (of `among`), or None. Step 0: no
        checkpoint has a better score than the model before training."""
        steps = [0, *(self.steps() if among is None else among)]
        scores = [(step, score) for step, score in self._scores().items() if step in steps]
        return max(scores, key=lambda found: (found[1], -found[0]), default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def repair_best(self, scores: Mapping[int, float]) -> UserError | None:
        """Write best.json again if it is damaged, from all held-out scores, and return the error."""
        try:
            self._scores()
        except UserError as error:
            write_object(self.folder / "best.json", scores)
            return error
        return None

    def _scores(self) -> dict[int, float]:
        path = self.folder / "best.json"
        way = f"`hacrl resume {self.folder.parents[1]}` writes it again from the metrics"
        found = read_object(path, way) if path.is_file() else {}
        return {int(step): score for step, score in found.items()}

    def _write_scores(self, scores: Mapping[int, float]) -> None:
        if scores != self._scores():
            write_object(self.folder / "best.json", scores)


def newest_common(
    all: Mapping[str, Checkpoints], report: Report, among: Collection[int] | None = None
) -> int | None:
    """Return the newest step (of `among`) with a checkpoint of every agent that verifies. Report the
    newer ones that do not."""
    steps = [set(steps_in(checkpoints.folder)) for checkpoints in all.values()]
    common = set.intersection(*steps) if steps else set()
    broken, found = "", None
    for step in sorted(common if among is None else common.intersection(among), reverse=True):
        try:
            for checkpoints in all.values():
                checkpoints.verify(step)
            found = step
            break
        except CorruptCheckpoint as error:
            broken += f"checkpoint of step {step} is corrupted ({error}); "
    if broken:
        used = "no older one is left" if found is None else f"using step {found} instead"
        report(broken + used)
    return found


def fingerprint_of(folder: Path, step: int) -> str | None:
    """The digest of the inputs that a checkpoint was trained with; None if it is not known."""
    try:
        return _json(folder / f"step-{step:06d}" / _MANIFEST).get("fingerprint")
    except CorruptCheckpoint:
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} is missing or not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path} is not a JSON object")
    return content


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file  # imports torch

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path)
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):  # safetensors reports it as text
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise


def _load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file  # imports torch

    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{path} is not safetensors ({error})") from error
