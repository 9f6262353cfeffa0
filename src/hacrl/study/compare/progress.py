"""Progress of a suite with the time left: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.progress import BarColumn, Progress, TextColumn

from hacrl.plain_console import PlainConsole
from hacrl.study.compare.suite import Run

LINE_EVERY = 30.0  # seconds between two lines outside a terminal while no run starts or ends
READ_EVERY = 2.0  # seconds between two readings of the runs' metrics


class SuiteProgress:
    """Measures work in rollouts, which take most of the time and differ between arms."""

    def __init__(self, runs: Sequence[Run], waiting: Sequence[Run], parallel: int) -> None:
        self.console = PlainConsole(stderr=True)
        self.runs, self.parallel = runs, parallel
        self._finished = len(runs) - len(waiting)
        self._total = {run.name: _rollouts(run) * run.config.steps for run in waiting}
        self._before = {run.name: _rollouts(run) * run.reader.steps_done() for run in waiting}
        self._done = dict(self._before)
        self._start = self._last_line = time.monotonic()
        self._last_read = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(30))
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=max(1, sum(self._total.values())))

    def __enter__(self) -> SuiteProgress:
        before = f", {self._finished} already finished" if self._finished else ""
        self._print(f"{len(self.runs)} runs{before}; {self.parallel} at a time")
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, run: Run) -> None:
        self._print(f"started: {run.name}")

    def finished(self, run: Run) -> None:
        self._finished += 1
        self._done[run.name] = self._total[run.name]
        self._print(f"finished: {run.name}; {self._state()}")

    def failed(self, run: Run, last: str) -> None:
        for counts in (self._total, self._before, self._done):
            counts.pop(run.name)
        self._print(f"failed: {run.name}: {last}")

    def postponed(self, run: Run, reason: str, slots: int) -> None:
        limit = "one run at a time" if slots == 1 else f"at most {slots} runs at a time"
        self._print(f"{reason}: {run.name}. It continues later; from now on {limit}")

    def interrupted(self) -> None:
        report = "; --report builds the report from the finished runs" if self._finished else ""
        self._print(
            f"{self._finished} of {len(self.runs)} runs are finished. The same command continues"
            f"{report}"
        )

    def update(self, active: Sequence[Run]) -> None:
        """Read how far the active runs are and show it."""
        now = time.monotonic()
        if now - self._last_read < READ_EVERY:
            return
        self._last_read = now
        for run in active:
            self._done[run.name] = _rollouts(run) * run.reader.steps_done()
        done, total = sum(self._done.values()), max(1, sum(self._total.values()))
        self._bar.update(self._task, completed=done, total=total, description=self._state())
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY:
            self._print(self._state())

    def _state(self) -> str:
        return f"{self._finished} of {len(self.runs)} runs, {self._time_left()}"

    def _time_left(self) -> str:
        """Estimated from the work of this process only."""
        done = sum(self._done.values()) - sum(self._before.values())
        left = sum(self._total.values()) - sum(self._done.values())
        passed = time.monotonic() - self._start
        if done <= 0 or left <= 0:
            return f"{timedelta(seconds=round(passed))} passed"
        return f"{timedelta(seconds=round(passed / done * left))} left"

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, soft_wrap=True)


def _rollouts(run: Run) -> int:
    """Rollouts of all agents in one step."""
    config = run.config
    return config.prompts_per_step * sum(config.samples_of(a) for a in config.agents)
