"""Progress of a suite with the time left: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hacrl.study.compare.suite import Cell

PLAIN_EVERY = 30.0
"""Seconds between two plain lines while nothing begins or ends."""
LOOK_EVERY = 2.0
"""Seconds between two readings of the cells' metrics."""


class SuiteProgress:
    """Counts work in rollouts: they take most of the time, and differ between arms."""

    def __init__(self, cells: Sequence[Cell], waiting: Sequence[Cell], parallel: int) -> None:
        self.console = Console(stderr=True)
        self.cells, self.parallel = cells, parallel
        self._done = len(cells) - len(waiting)
        self._found = {cell.name: _work(cell) * _steps_done(cell) for cell in waiting}
        self._work = {cell.name: _work(cell) * cell.config.steps for cell in waiting}
        self._made = dict(self._found)
        self._start = self._last_line = time.monotonic()
        self._last_look = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[t]}"))
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=max(1, sum(self._work.values())), t="")

    def __enter__(self) -> SuiteProgress:
        there = f", {self._done} of them finished before" if self._done else ""
        self._print(f"{len(self.cells)} cells{there}; {self.parallel} side by side")
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, cell: Cell) -> None:
        self._print(f"begins: {cell.name}")

    def finished(self, cell: Cell) -> None:
        self._done += 1
        self._made[cell.name] = self._work[cell.name]
        self._print(f"done: {cell.name}; {self._state()}")

    def failed(self, cell: Cell, last: str) -> None:
        self._made.pop(cell.name)
        self._found.pop(cell.name)
        self._work.pop(cell.name)  # it will not be worked on any more
        self._print(f"failed: {cell.name}: {last}")

    def postponed(self, cell: Cell, why: str, room: int) -> None:
        self._print(
            f"{why}: {cell.name}. It goes on when there is room; from now on "
            f"{'one cell at a time' if room == 1 else f'at most {room} side by side'}"
        )

    def interrupted(self) -> None:
        judge = "; with --report it judges what is there" if self._done else ""
        self._print(
            f"{self._done} of {len(self.cells)} cells are finished. The same command goes on{judge}"
        )

    def look(self, running: Sequence[Cell]) -> None:
        now = time.monotonic()
        if now - self._last_look < LOOK_EVERY:
            return
        self._last_look = now
        for cell in running:
            self._made[cell.name] = _work(cell) * _steps_done(cell)
        made, total = sum(self._made.values()), max(1, sum(self._work.values()))
        self._bar.update(self._task, completed=made, total=total, t=self._state())
        if not self.console.is_terminal and now - self._last_line >= PLAIN_EVERY:
            self._print(self._state())

    def _state(self) -> str:
        return f"{self._done} of {len(self.cells)} cells, {self._time_left()}"

    def _time_left(self) -> str:
        """From the work made since this process began."""
        made = sum(self._made.values()) - sum(self._found.values())
        left = sum(self._work.values()) - sum(self._made.values())
        passed = time.monotonic() - self._start
        if made <= 0:
            return f"{timedelta(seconds=round(passed))} so far"
        return f"{timedelta(seconds=round(passed / made * left))} left"

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _work(cell: Cell) -> int:
    """Rollouts of all members in a step."""
    config = cell.config
    return config.prompts_per_step * sum(config.samples_of(a) for a in config.agents)


def _steps_done(cell: Cell) -> int:
    return sum(row["kind"] == "train" for row in cell.run.metrics()) // len(cell.config.agents)
