"""Progress of a run on standard error: one line in a terminal, else a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hacrl.cli.terminal import program
from hacrl.logs.observer import Observer
from hacrl.plain_console import PlainConsole
from hacrl.replies import judged_counts, judged_text, score_name
from hacrl.safe_text import plural, printable
from hacrl.study.inspect.summary import estimate_of
from hacrl.study.tables import percent

if TYPE_CHECKING:
    from hacrl.config import Config
    from hacrl.store.rundir import RunDirectory

PLAIN_EVERY = 10.0
"""Seconds between two lines outside a terminal. The first and the last step always get one."""


class ProgressLine(Observer):
    """Shows step, time left, phase and rewards, e.g.

    step 3/18  0:02:10 left  rollouts 14 s  reward wren 0.41  finch 0.22

    In a terminal the seconds of the phase move, and agents that do not fit are counted.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or PlainConsole(stderr=True)
        self._steps = self._first = self._done = 0
        self._first_done = self._last_done = 0.0
        self._last_line = float("-inf")
        self._phase, self._phase_began = "", 0.0
        self._rewards: list[str] = []  # e.g. ["wren 0.41", "finch 0.22"]
        self._score = score_name("exact")
        self._live = Live(
            console=self.console,
            get_renderable=lambda: Text(
                self._line(self.console.width), no_wrap=True, overflow="ellipsis"
            ),
            transient=True,
            refresh_per_second=2,
        )

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.finished()

    def started(self, config: Config, run: RunDirectory, step: int) -> None:
        self._steps, self._first, self._done = config.steps, step, step
        self._score = score_name(config.verifier.kind)
        self._last_line = time.monotonic()
        if step >= config.steps:
            more = "" if config.hub else f"; `{program()} resume {run.path} steps=N` adds more"
            return self._print(f"All {config.steps} steps are done ({run.path}){more}.")
        names = ", ".join(agent.name for agent in config.agents)
        steps = f"steps {step + 1} to {config.steps}" if step else plural(config.steps, "step")
        self._print(f"Training {names} with {config.algorithm.name} for {steps} -> {run.path}")
        if step:
            self._print(
                f"It continues from the checkpoint after step {step}; replies that are in the journals "
                "are not sampled again."
            )

    def phase(self, text: str) -> None:
        now = time.monotonic()
        self._phase, self._phase_began = text, now
        if self.console.is_terminal:
            self._live.start()
        elif self._steps and now - self._last_line >= PLAIN_EVERY:
            self._last_line = now
            self._print(self._line())

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        now = self._last_done = time.monotonic()
        self._done = step + 1
        values = ((row["agent"], row["reward"]) for row in rows)
        self._rewards = [f"{name} {'-' if r is None else format(r, '.2f')}" for name, r in values]
        if self._done == self._first + 1:
            self._first_done = now
        edge = self._done in (self._first + 1, self._steps)
        if not self.console.is_terminal and (edge or now - self._last_line >= PLAIN_EVERY):
            self._last_line, self._phase = now, ""
            self._print(self._line())

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        name, unit = self._score
        scores = "  ".join(
            f"{row['agent']} {percent(found)}{unit}{judged_text(*judged_counts(row))}"
            if (found := estimate_of(row))
            else f"{row['agent']} not judged"
            for row in rows
        )
        when = f"after step {step}" if step else "before training"
        self._print(f"{name} {when}: {scores}")

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finished(self) -> None:
        self._live.stop()

    def _line(self, width: int = 10**6) -> str:
        """The line, with as many agents as fit into `width` columns."""
        step = f"step {self._done}/{self._steps}" if self._steps else ""
        spent = int(time.monotonic() - self._phase_began)
        phase = f"{self._phase} {spent} s" if self._phase and spent else self._phase
        line = "  ".join(part for part in (step, self._time_left(), phase) if part)
        for i, reward in enumerate(self._rewards):
            more = f"{line}  {reward if i else f'reward {reward}'}"
            left = len(self._rewards) - i
            if len(more) > width - (10 if left > 1 else 0):
                return f"{line}  +{left}"
            line = more
        return line

    def _time_left(self) -> str:
        """From the steps after the first one, which also loads, compiles and evaluates."""
        timed, left = self._done - self._first - 1, self._steps - self._done
        if timed < 1 or left < 1:
            return ""
        seconds = (self._last_done - self._first_done) / timed * left
        seconds -= time.monotonic() - self._last_done
        return f"{timedelta(seconds=max(0, round(seconds)))} left"

    def _print(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
