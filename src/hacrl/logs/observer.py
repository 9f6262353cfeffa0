"""Progress of a run, as callbacks. The command line shows it; a library call stays quiet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any

from hacrl.config import Config
from hacrl.errors import UserError, describe, interruption
from hacrl.safe_text import mask_text
from hacrl.store.files import write_atomic
from hacrl.store.rundir import RunDirectory

PHASES = {
    "restore": "loading",
    "rollout": "rollouts",
    "learn": "learning",
    "evaluate": "evaluating",
    "save": "saving",
    "prune": "deleting old files",
}
"""What the progress line shows during a call."""


class Observer:
    """Receives the progress of a run. This class shows notes as warnings and ignores the rest."""

    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        """The team is loaded. Training starts at `step`."""

    def phase(self, text: str) -> None:
        """The team enters a phase of a step, e.g. "rollouts"."""

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A step is done. `rows` has one metrics row for each agent."""

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """All agents were evaluated after `step` steps."""

    def note(self, text: str) -> None:
        """A message for the user, e.g. about a corrupted checkpoint."""
        warnings.warn(text, stacklevel=2)

    def finished(self) -> None: ...


class NotesOnDisk(Observer):
    """Writes notes to the run's notes.jsonl, with the number of steps done, and the error that ends the
    training to error.txt. Nothing is written until training starts, so a refused resume leaves nothing.

    Example: NotesOnDisk(run).note("3 prompts are too long.")
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self._done = run, 0
        self.trains = False  # whether training has started
        self._early: list[str] = []

    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        self._done, self.trains = step, True
        self.run.error_path.unlink(missing_ok=True)
        for text in self._early:
            self.note(text)

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._done = step + 1

    def note(self, text: str) -> None:
        if self.trains:
            self.run.add_note(self._done, text)
        else:
            self._early.append(text)

    def failed(self, error: Exception) -> None:
        if interruption(error) is None:
            with suppress(OSError, UserError):  # a full disk
                write_atomic(self.run.error_path, mask_text(describe(error)) + "\n")


Callback = Callable[[int, Sequence[Mapping[str, Any]]], None] | object
"""A function f(step, rows), called after each step, or an object with any methods of `Observer`."""


class Several(Observer):
    """Passes every call on to observers and callbacks, in order. One that raises stops the run.

    Example: Several(ProgressLine(), lambda step, rows: print(step))
    """

    def __init__(self, *callbacks: Callback) -> None:
        self.callbacks = callbacks

    def _call(self, method: str, *args: Any) -> None:
        for callback in self.callbacks:
            if called := getattr(callback, method, None):
                called(*args)
            elif method == "stepped" and callable(callback):
                callback(*args)


for _method in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Several, _method, partialmethod(Several._call, _method))
