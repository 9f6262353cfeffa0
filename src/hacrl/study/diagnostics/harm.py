"""When a peer counts as harmful: evidence over several checks of one run.

Each check c estimates the gain g_c of one step of the peer's samples, with its standard error, on
problems drawn anew (gain.py). After C checks

    mean = 1/C sum g_c,   se = 1/C sqrt(sum se_c^2)

and the peer hurts if mean + t se < 0. Testing after every check would eventually find harm in noise, so
each test spends a part of the allowed error: 5 % for the run, divided equally between all pairs of
learner and peer; the test after C checks (the first is after 3) takes 1 / ((C - 2)(C - 1)) of a pair's
part. These add up to 1: a run of any length in which no peer hurts warns with probability at most 5 %.
t is Student's, one-sided; each check adds its number of problems minus one degrees of freedom.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean
from typing import Any

from hacrl.config import Config
from hacrl.statistics import LEVEL, t_quantile
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]  # a line of metrics.jsonl

CHECKED = "diagnostics/cost/rollouts"  # the metrics rows of a check contain this key: its rollouts
FIRST_TEST = 3  # number of checks before the first test


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
    """A peer that hurts, at the first test that shows it.

    Example: Harm("wren", "finch", step=10, checks=3, mean=-0.004, high=-0.001, own=0.02)
    """

    learner: str
    peer: str
    step: int
    checks: int
    mean: float  # mean gain of one step of the peer's samples over the checks so far
    high: float  # upper end of its interval at this test
    own: float | None  # mean gain of the learner's own samples

    @property
    def sentence(self) -> str:
        own = "" if self.own is None else f" (own samples: {100 * self.own:+.2f})"
        return (
            f"{self.peer} hurts {self.learner}: at {self.checks} checks up to step {self.step + 1} one "
            f"step of {self.peer}'s samples changed {self.learner}'s held-out reward by "
            f"{100 * self.mean:+.2f} points{own}, to first order; the interval ends at "
            f"{100 * self.high:+.2f}. Train {self.learner} without {self.peer}, or compare both ways "
            "with `hacrl compare` (docs/diagnostics.md)."
        )


def gains(rows: Iterable[Row], learner: str, source: str) -> list[Gain]:
    """The checks of a learner with a gain of this source, by step."""
    found = []
    for row in rows:
        value, error = (row.get(f"diagnostics/{k}/{source}") for k in ("gain", "gain_se"))
        if row["kind"] != "train" or row["agent"] != learner or value is None or error is None:
            continue
        if isfinite(value) and isfinite(error):
            found.append(Gain(row["step"], value, error, int(row["diagnostics/unseen/problems"])))
    return sorted(found, key=lambda g: g.step)


def upper_end(checks: Sequence[Gain], pairs: int) -> float:
    """Upper end of the mean gain at the test after these checks, at least FIRST_TEST."""
    count = len(checks)
    spent = LEVEL / pairs / ((count - 2) * (count - 1))
    error = sqrt(sum(c.error**2 for c in checks)) / count
    freedom = sum(c.problems - 1 for c in checks)
    return fmean(c.value for c in checks) + t_quantile(freedom, 2 * spent) * error


def find_harm(config: Config, rows: Sequence[Row]) -> list[Harm]:
    """The pairs of learner and peer for which the metrics show harm, in the order of the team."""
    learners = [a.name for a in config.agents if a.learns]
    pairs = [(k, a.name) for k in learners for a in config.agents if a.name != k]
    found = []
    for learner, peer in pairs:
        checks = gains(rows, learner, peer)
        for count in range(FIRST_TEST, len(checks) + 1):
            high = upper_end(checks[:count], len(pairs))
            if high < 0:
                step, mean = checks[count - 1].step, fmean(c.value for c in checks[:count])
                own = [g.value for g in gains(rows, learner, learner) if g.step <= step]
                gain = fmean(own) if own else None
                found.append(Harm(learner, peer, step, count, mean, high, gain))
                break
    return found


class HarmWatch:
    """Warns once about each harmful peer, also across a resume."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._rows: list[Row] = [row for row in run.metric_rows() if CHECKED in row]
        self._warned: set[tuple[str, str]] | None = None

    def look(self, rows: Sequence[Row]) -> list[str]:
        """Warnings that these new rows give rise to."""
        checked = [row for row in rows if CHECKED in row]
        if not checked:
            return []
        config = self.run.config()
        if self._warned is None:
            self._warned = {(h.learner, h.peer) for h in find_harm(config, self._rows)}
        self._rows += checked
        harms = find_harm(config, self._rows)
        new = [h for h in harms if (h.learner, h.peer) not in self._warned]
        self._warned |= {(h.learner, h.peer) for h in new}
        return [h.sentence for h in new]
