"""Progress of a run, as callbacks. The command line shows it; a library call stays quiet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hacrl.config import Config
from hacrl.store.rundir import RunDirectory

PHASES = {
    "restore": "loading",
    "rollout": "rollouts",
    "learn": "learning",
    "evaluate": "evaluating",
    "save": "checkpoint",
}
"""What the progress line shows during a call."""


class Observer(Protocol):
    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        """The team is loaded; training goes on from `step`."""

    def phase(self, text: str) -> None:
        """What is being done now, in a few words."""

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A step is done; one metrics row an agent."""

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """All agents were evaluated after `step` steps."""

    def note(self, text: str) -> None:
        """Something a person should know (a corrupted checkpoint, say)."""

    def finished(self) -> None: ...


class Quiet:
    """Says nothing but notes, as warnings."""

    def started(self, config: Config, run: RunDirectory, step: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def note(self, text: str) -> None:
        import warnings

        warnings.warn(text, stacklevel=2)

    def finished(self) -> None: ...


class NotesOnDisk:
    """Passes every call on to an observer, and also writes notes to the run's notes.jsonl.

    Example: NotesOnDisk(Quiet(), run).note("3 prompts are too long.")
    """

    def __init__(self, observer: Observer, run: RunDirectory) -> None:
        self.run, self.observer, self._step = run, observer, 0
        self.phase, self.finished = observer.phase, observer.finished

    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        self._step = step
        self.observer.started(config, run, step)

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._step = step + 1
        self.observer.stepped(step, rows)

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.observer.evaluated(step, rows)

    def note(self, text: str) -> None:
        self.run.add_note(self._step, text)
        self.observer.note(text)


Callback = Callable[[int, Sequence[Mapping[str, Any]]], None] | object
"""A function f(step, rows), called after each step, or an object with any methods of `Observer`."""


class Several:
    """An observer and callbacks, which get every call after it. A callback that raises stops the run.

    Example: with Several(ProgressLine(), [lambda step, rows: print(step)]) as observer: ...
    """

    def __init__(
        self, observer: AbstractContextManager[Observer | None], callbacks: Sequence[Callback]
    ) -> None:
        self._context, self.callbacks = observer, callbacks
        self.observer: Observer = Quiet()

    def __enter__(self) -> Several:
        self.observer = self._context.__enter__() or Quiet()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def _call(self, method: str, *args: Any) -> None:
        getattr(self.observer, method)(*args)
        for callback in self.callbacks:
            if called := getattr(callback, method, None):
                called(*args)
            elif method == "stepped" and callable(callback):
                callback(*args)

    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        self._call("started", config, run, step)

    def phase(self, text: str) -> None:
        self._call("phase", text)

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._call("stepped", step, rows)

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._call("evaluated", step, rows)

    def note(self, text: str) -> None:
        self._call("note", text)

    def finished(self) -> None:
        self._call("finished")
