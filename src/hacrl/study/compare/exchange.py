"""The exchange rate f: how many rollouts alone reach what an agent reaches in its team?

A suite names arms of learning alone with growing budgets (`alone`, e.g. GSPO x1, x2, x4). Their
accuracies against log2(rollouts) are fitted with a curve that never falls (isotonic regression,
linear between the arms). f is the number of rollouts at which that curve reaches the team's accuracy,
divided by the agent's own rollouts in the team.

f = 1: peers are worth nothing. f = n: a peer's rollout is worth an own one, where n is the number of
rollouts of the team for one own rollout (the number of agents, if they sample equally).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2, sqrt
from statistics import fmean
from typing import Any, Literal

from hacrl.config import Config
from hacrl.statistics import CROSSED_RESAMPLES, Z95, resample_counts, t_quantile
from hacrl.study.compare.reading import AgentRun
from hacrl.study.compare.suite import uses_peers

Parity = Literal["shown", "open", "refuted", "not identifiable"]


@dataclass(frozen=True)
class Exchange:
    """f of one agent under one arm with its 95 % interval. A value above the curve is infinite, a value
    below it is 0.

    Example: Exchange(2.3, 1.4, inf, n=2.0, multiples=(1.0, 2.0, 4.0), curve=(0.4, 0.45, 0.52),
             seeds=8, flat=False)
    """

    f: float
    low: float
    high: float
    n: float
    multiples: tuple[float, ...]
    """Rollouts of the arms alone, as multiples of the agent's own rollouts."""
    curve: tuple[float, ...]  # fitted accuracies at these multiples
    seeds: int  # seeds that are finished in this arm and in all arms alone
    flat: bool
    """Whether the interval of the rise from the smallest to the largest budget alone contains 0: f is
    then not identifiable."""

    @property
    def parity(self) -> Parity:
        """Whether f >= n: shown, refuted, or open if the interval contains n (or for one seed)."""
        if self.flat:
            return "not identifiable"
        if self.seeds < 2:
            return "open"
        if self.n <= min(self.low, self.multiples[-1]):
            return "shown"
        below = self.multiples[0] <= self.n if self.high == 0 else self.high < self.n
        return "refuted" if below else "open"

    @property
    def text(self) -> str:
        """E.g. 2.3 [1.4, > 4]"""
        if self.flat:
            return "not identifiable"
        return f"{self._number(self.f)} [{self._number(self.low)}, {self._number(self.high)}]"

    def _number(self, f: float) -> str:
        if f == inf:
            return f"> {self.multiples[-1]:.3g}"
        return f"{f:.2f}" if f else f"< {self.multiples[0]:.3g}"


def exchange_rate(mine: Sequence[AgentRun], alone: Sequence[Sequence[AgentRun]]) -> Exchange | None:
    """f of one agent from its runs under one arm and under the arms alone, with growing budgets, on the
    seeds and problems that all have; None if there is no such seed or problem."""
    arms = [{r.run.seed: r for r in runs} for runs in (mine, *alone)]
    seeds = sorted(set.intersection(*(set(runs) for runs in arms)))
    found = [[runs[seed] for seed in seeds] for runs in arms]
    problems = [set(r.scores) for runs in found for r in runs]
    common = sorted(set.intersection(*problems)) if problems else []
    own = fmean(r.last.rollouts for r in found[0]) if common else 0
    if not own:
        return None
    multiples = tuple(fmean(r.last.rollouts for r in runs) / own for runs in found[1:])
    scores = [[[r.scores[p] for p in common] for r in runs] for runs in found]
    f, low, high, curve, flat = solve(scores, multiples)
    n = team_rollouts(mine[0].run.config, mine[0].agent)
    return Exchange(f, low, high, n, multiples, curve, len(seeds), flat)


def team_rollouts(config: Config, agent: str) -> float:
    """Rollouts of the whole team for one rollout of the agent; 1 if the algorithm uses no peers."""
    if not uses_peers(config):
        return 1.0
    samples = {a.name: config.samples_of(a) for a in config.agents}
    return sum(samples.values()) / samples[agent]


def solve(
    scores: Any, multiples: Sequence[float]
) -> tuple[float, float, float, tuple[float, ...], bool]:
    """f, its 95 % interval, the fitted curve, and whether the curve is flat.

    `scores` has the axes arm (the team first, then the arms alone), seed, problem. The bootstrap
    resamples seeds and problems, the same ones in every arm. Deviations over few seeds are widened to
    the width of Student's t interval.
    """
    import numpy as np

    table = np.asarray(scores, dtype=np.float64)
    seeds, problems = table.shape[1:]
    mean = table.mean(axis=(1, 2))
    by_problem = resample_counts(problems, 2) @ table.mean(axis=1).T / problems - mean
    draws = mean + between_problems(table) * by_problem
    if seeds > 1:
        wider = t_quantile(seeds - 1) / Z95 * sqrt(seeds / (seeds - 1))
        draws += wider * (resample_counts(seeds, 1) @ table.mean(axis=2).T / seeds - mean)
    curve, curves = isotonic(mean[None, 1:])[0], isotonic(draws[:, 1:])
    at = [log2(m) for m in multiples]
    found = np.sort(invert(at, curves, draws[:, 0]))
    cut = CROSSED_RESAMPLES // 40
    rise = np.sort(draws[:, -1] - draws[:, 1])
    f = float(invert(at, curve[None], mean[:1])[0])
    fitted = tuple(float(height) for height in curve)
    return f, float(found[cut]), float(found[-cut - 1]), fitted, bool(rise[cut] <= 0)


def between_problems(table: Any) -> float:
    """Root of the fraction of variance of the problems' means that is due to problems, not to the noise
    of single replies: resampling seeds contains that noise already. Differences between arms only."""
    import numpy as np

    own = table - table.mean(axis=0)
    seeds, problems = own.shape[1:]
    if seeds < 2 or problems < 2:
        return 1.0
    means = own.mean(axis=1, keepdims=True)
    rest = own - means - own.mean(axis=2, keepdims=True) + own.mean(axis=(1, 2), keepdims=True)
    noise = (rest**2).sum() / (seeds - 1) / seeds
    total = ((means - means.mean(axis=2, keepdims=True)) ** 2).sum()
    return float(np.sqrt(max(0.0, 1 - noise / total))) if total else 0.0


def isotonic(values: Any) -> Any:
    """The closest non-decreasing row to each row, by least squares: the largest over a <= i of the
    smallest over b >= i of the mean of a..b.

    Example: isotonic([[1.0, 3.0, 2.0]]) == [[1.0, 2.5, 2.5]]
    """
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    places = range(values.shape[1])

    def height(i: int) -> Any:
        lowest = (
            np.min([values[:, a : b + 1].mean(axis=1) for b in places[i:]], axis=0)
            for a in places[: i + 1]
        )
        return np.max([*lowest], axis=0)

    return np.stack([height(i) for i in places], axis=1)


def invert(at: Sequence[float], curves: Any, heights: Any) -> Any:
    """2^x at which each non-decreasing curve first reaches its height: 0 if it starts above, infinite
    if it never does. `at` are the x of the curves' points.

    Example: invert([0, 1], [[0.2, 0.4]], [0.3]) == [2 ** 0.5]
    """
    import numpy as np

    curves, heights = np.asarray(curves), np.asarray(heights)
    found = np.where(heights > curves[:, -1], inf, 0.0)
    found[heights == curves[:, 0]] = 2.0 ** at[0]
    for (x0, y0), (x1, y1) in pairwise(zip(at, curves.T, strict=True)):
        here = (y0 < heights) & (heights <= y1)
        x = x0 + (x1 - x0) * (heights[here] - y0[here]) / (y1[here] - y0[here])
        found[here] = 2.0**x
    return found
