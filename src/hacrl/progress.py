"""Progress of a run: one line in a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from hacrl.config import Config
from hacrl.store.rundir import RunDirectory

PLAIN_EVERY = 10.0
"""Seconds between two plain lines; the first and the last step always have one."""


class ProgressLine:
    """Shows a run while it runs (an Observer). Details go to the run directory, not here.

    `beside`, if given, adds a few words on what else goes on (the other half of the demo).
    """

    def __init__(self, console: Console | None = None, beside: Callable[[], str] | None = None):
        self.console = console or Console(stderr=True)
        self.beside = beside or (lambda: "")
        self._bar = Progress(
            TextColumn("{task.fields[place]}", justify="left"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[rewards]}"),
            TextColumn("[dim]{task.fields[state]}"),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._steps = self._first = self._done = 0
        self._start = time.monotonic()
        self._last_line = float("-inf")
        self._rewards = self._phase = ""

    # ------------------------------------------------------------ what a runtime tells

    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        self._steps, self._first, self._done = config.steps, step, step
        self._start = time.monotonic()
        names = ", ".join(a.name for a in config.agents)
        self._print(
            f"{config.algorithm.name}, {names}: steps {step} to {config.steps} in {run.path}"
        )
        self._show()

    def phase(self, text: str) -> None:
        if text == "loading" and self._task is None and self.console.is_terminal:
            self._task = self._bar.add_task("", total=None, place="", rewards="", state="")
            self._bar.start()
        self._phase = text
        self._show()

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._done = step + 1
        self._rewards = rewards_text(rows)
        self._show()
        now = time.monotonic()
        edge = self._done in (self._first + 1, self._steps)
        if not self.console.is_terminal and (edge or now - self._last_line >= PLAIN_EVERY):
            self._last_line = now
            self._print(f"{self._place()}  reward {self._rewards}  {self._time_left()}")

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        scores = "  ".join(
            f"{row['agent']} {100 * row['accuracy']:.1f}"
            f"±{50 * (row['accuracy/high'] - row['accuracy/low']):.1f} %"
            if row["accuracy"] is not None
            else f"{row['agent']} not judged"
            for row in rows
        )
        self._print(f"held out after step {step}: {scores}")

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finished(self) -> None:
        self.close()

    def close(self) -> None:
        """Take the line away; also when the run ends otherwise."""
        if self._task is not None:
            self._bar.stop()

    # ------------------------------------------------------------ its parts

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self) -> str:
        return f"step {self._done}/{self._steps}"

    def _time_left(self) -> str:
        made = self._done - self._first
        left = self._steps - self._done
        if not made or not left:
            return ""
        seconds = (time.monotonic() - self._start) / made * left
        return f"{timedelta(seconds=round(seconds))} left"

    def _show(self) -> None:
        if self._task is None:
            return
        parts = [self._phase, self._time_left(), self.beside()]
        self._bar.update(
            self._task,
            total=self._steps or None,
            completed=self._done,
            place=self._place() if self._steps else "",
            rewards=self._rewards,
            state=", ".join(p for p in parts if p),
        )

    def _print(self, text: str) -> None:
        # Through the bar's console, so that a line never breaks the bar; words are not markup.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def rewards_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every agent with its reward of the step, e.g. "wren 0.41  finch 0.22"."""
    return "  ".join(
        f"{row['agent']} {'-' if row['reward'] is None else format(row['reward'], '.2f')}"
        for row in rows
    )
