"""When a peer is said to hurt: evidence over several checks of one run.

At each check c a learner has an estimate g_c of what a step of the peer's samples brings it on problems
drawn anew, with its standard error (gain.py). After C checks

    mean = 1/C sum g_c,   se = 1/C sqrt(sum se_c^2)

and the peer hurts if mean + t se < 0. Looking again after every check would find harm in noise sooner or
later; so each look spends a part of the allowed error: 5 % for the run, the same share for every pair of
learner and peer, of which the look after C checks (the first is after 3) takes 1 / ((C - 2)(C - 1)).
These parts add up to 1: a run in which no peer hurts warns with a chance of at most 5 %, however long.
t is Student's, one-sided, with the checks' problems less one each as degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean
from typing import Any

from hacrl.config import Config
from hacrl.statistics import LEVEL, t_quantile
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""

CHECKED = "diagnostics/cost/rollouts"
"""A row with this has a check."""
FIRST_LOOK = 3
"""Checks before anything is said."""


@dataclass(frozen=True)
class Gain:
    """One check of one learner and source.

    Example: Gain(step=10, value=-0.004, error=0.002, problems=16)
    """

    step: int
    value: float
    error: float
    problems: int


@dataclass(frozen=True)
class Harm:
    """A peer that hurts, as of the look that said so first.

    Example: Harm("wren", "finch", step=10, checks=3, mean=-0.004, high=-0.001, own=0.02)
    """

    learner: str
    peer: str
    step: int
    checks: int
    mean: float
    """Held-out reward by one step of the peer's samples, over the checks so far."""
    high: float
    """Upper end of its interval at this look."""
    own: float | None
    """The same of the learner's own samples."""

    @property
    def sentence(self) -> str:
        own = "" if self.own is None else f" (its own samples: {100 * self.own:+.2f})"
        return (
            f"{self.peer} hurts {self.learner}: at {self.checks} checks up to step {self.step} a step "
            f"of {self.peer}'s samples moved {self.learner} by {100 * self.mean:+.2f} points of reward "
            f"on held-out problems{own}, to first order; the interval ends at {100 * self.high:+.2f}. "
            f"Train {self.learner} without {self.peer}, or compare both ways (docs/diagnostics.md)."
        )


def gains(rows: Iterable[Row], learner: str, source: str) -> list[Gain]:
    """The checks of a learner that know the source's gain, by step."""
    found = []
    for row in rows:
        value, error = (row.get(f"diagnostics/{k}/{source}") for k in ("gain", "gain_se"))
        if row["kind"] != "train" or row["agent"] != learner or value is None or error is None:
            continue
        if isfinite(value) and isfinite(error):
            found.append(Gain(row["step"], value, error, int(row["diagnostics/unseen/problems"])))
    return sorted(found, key=lambda g: g.step)


def upper_end(checks: Sequence[Gain], pairs: int) -> float | None:
    """The mean gain's upper end at the look after these checks; None before the first look."""
    count = len(checks)
    if count < FIRST_LOOK:
        return None
    spent = LEVEL / pairs / ((count - 2) * (count - 1))
    error = sqrt(sum(c.error**2 for c in checks)) / count
    freedom = sum(c.problems - 1 for c in checks)
    return fmean(c.value for c in checks) + t_quantile(freedom, 2 * spent) * error


def find_harm(config: Config, rows: Sequence[Row]) -> list[Harm]:
    """Every pair of learner and peer of which a run's metrics tell harm, in the order of the team."""
    learners = [a.name for a in config.agents if a.learns]
    pairs = [(k, a.name) for k in learners for a in config.agents if a.name != k]
    found = []
    for learner, peer in pairs:
        checks = gains(rows, learner, peer)
        for count in range(FIRST_LOOK, len(checks) + 1):
            high = upper_end(checks[:count], len(pairs))
            if high is not None and high < 0:
                step = checks[count - 1].step
                own = [g.value for g in gains(rows, learner, learner) if g.step <= step]
                found.append(
                    Harm(
                        learner,
                        peer,
                        step,
                        count,
                        fmean(c.value for c in checks[:count]),
                        high,
                        fmean(own) if own else None,
                    )
                )
                break
    return found


class HarmWatch:
    """Tells each harm once, also across a resume: what the metrics of before told is known."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._rows: list[Row] = [row for row in run.metrics() if CHECKED in row]
        self._told: set[tuple[str, str]] | None = None

    def look(self, rows: Sequence[Row]) -> list[str]:
        """Sentences for what these rows add to those before."""
        checked = [row for row in rows if CHECKED in row]
        if not checked:
            return []
        config = self.run.config()
        if self._told is None:
            self._told = {(h.learner, h.peer) for h in find_harm(config, self._rows)}
        self._rows += checked
        harms = find_harm(config, self._rows)
        new = [h for h in harms if (h.learner, h.peer) not in self._told]
        self._told |= {(h.learner, h.peer) for h in new}
        return [h.sentence for h in new]
