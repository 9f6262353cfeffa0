"""Progress of a run, as callbacks. The command line shows it; a library call stays quiet."""

from collections.abc import Mapping, Sequence
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
