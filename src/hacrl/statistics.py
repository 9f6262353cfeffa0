"""Means with 95 percent intervals, over problems, seeds or both; learning curves; the correction for
many comparisons; and the figures of repeated attempts: pass@k, best@k, maj@k.

Plain numbers in, plain numbers out; what a reply or a problem is, others know. All of it is
deterministic: the same values in the same order give the same figures, to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import atan, comb, cos, inf, pi, sin, sqrt
from random import Random
from statistics import fmean, stdev

import numpy as np

from hacrl.errors import UserError

Z95 = 1.959963984540054
FEW = 100
"""Below so many values that are not all 0 or 1, the interval is a bootstrap."""
RESAMPLES = 10_000
CROSSED_RESAMPLES = 4_000
LEVEL = 0.05
"""The chance of a false claim that a 95 percent interval, and Holm's correction, allow."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 percent interval.

    Example: Estimate(mean=0.5, low=0.4, high=0.6, count=100)
    """

    mean: float
    low: float
    high: float
    count: int
    method: str = "normal"
    """How the interval was made: normal, wilson, bootstrap, t, or crossed bootstrap."""


def estimate(values: Sequence[float]) -> Estimate:
    """Normal interval of the mean of independent values (one value a problem, say). One value has
    no interval: it is then its own."""
    centre = fmean(values)
    half = Z95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(centre, centre - half, centre + half, len(values))


def wilson(right: int, count: int) -> Estimate:
    """A share with Wilson's score interval: sensible for few problems and for 0 or all right, where
    the normal interval has no width.

        (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    share, z2 = right / count, Z95 * Z95
    centre = share + z2 / (2 * count)
    half = Z95 * sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    scale = 1 + z2 / count
    low = 0.0 if right == 0 else (centre - half) / scale
    high = 1.0 if right == count else (centre + half) / scale
    return Estimate(share, low, high, count, "wilson")


def bootstrap(values: Sequence[float]) -> Estimate:
    """Percentile bootstrap of the mean, seeded: 10,000 resamples of the values, the 2.5th and 97.5th
    percentile of their means. Stays inside the values' range, unlike the normal interval."""
    draw = Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return Estimate(fmean(values), means[cut], means[-cut - 1], len(values), "bootstrap")


def estimate_scores(values: Sequence[float]) -> Estimate:
    """Mean of one score in [0, 1] a problem, with the interval that fits: Wilson where every score
    is 0 or 1, bootstrap for fewer than 100 other ones, normal beyond that."""
    if not values:
        raise UserError("there is no judged problem, so there is nothing to average")
    if all(v in (0.0, 1.0) for v in values):
        return wilson(round(sum(values)), len(values))
    return bootstrap(values) if len(values) < FEW else estimate(values)


def compare_paired(a: Mapping[str, float], b: Mapping[str, float]) -> Estimate:
    """What `b` scores above `a`: the mean of b - a over the problems that both have, with its
    interval over problems; `count` is their number. Differences of the same problem are narrower
    than the difference of two means. Bootstrap below 100 problems, normal from there on.

    Example: compare_paired({"p": 0.0, "q": 1.0}, {"p": 1.0, "q": 1.0, "r": 0.0}).mean == 0.5
    """
    both = sorted(a.keys() & b.keys())
    if not both:
        raise UserError("the two have no problem in common, so they cannot be compared by problem")
    differences = [b[p] - a[p] for p in both]
    return bootstrap(differences) if len(both) < FEW else estimate(differences)


# ---------------------------------------------------------------- a few seeds


def t_interval(values: Sequence[float]) -> Estimate:
    """Interval of the mean of a few independent values (one value a seed) by Student's t: wider than
    the normal one, since their spread is itself known only roughly. One value says nothing about the
    spread: its interval is the whole line."""
    centre, count = fmean(values), len(values)
    if count < 2:
        return Estimate(centre, -inf, inf, count, "t")
    half = t_quantile(count - 1) * stdev(values) / sqrt(count)
    return Estimate(centre, centre - half, centre + half, count, "t")


def t_test(values: Sequence[float]) -> float:
    """The chance of a mean at least so far from zero, on either side, if the true mean were zero.
    Below 0.05 exactly where t_interval excludes zero."""
    if len(values) < 2:
        return 1.0
    centre, spread = fmean(values), stdev(values)
    if spread == 0:
        return 1.0 if centre == 0 else 0.0
    return 1.0 - t_within(abs(centre) / (spread / sqrt(len(values))), len(values) - 1)


def t_within(t: float, freedom: int) -> float:
    """The chance that |T| <= t for Student's T with a whole number of degrees of freedom v, as a
    finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4), with theta = atan(t / sqrt(v)):

        v odd:   2/pi (theta + sin cos (1 + 2/3 cos^2 + (2 4)/(3 5) cos^4 + ...))   up to cos^(v-3)
        v even:  sin (1 + 1/2 cos^2 + (1 3)/(2 4) cos^4 + ...)                       up to cos^(v-2)
    """
    theta = atan(t / sqrt(freedom))
    odd = freedom % 2
    term, total = 1.0, 0.0
    for i in range((freedom - odd) // 2):
        total += term
        term *= (2 * i + 1 + odd) / (2 * i + 2 + odd) * cos(theta) ** 2
    if odd:
        return 2 / pi * (theta + sin(theta) * cos(theta) * total)
    return sin(theta) * total


@lru_cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with t_within(t) = 1 - level: 12.706, 4.303, 3.182, 2.776 for 1 to 4."""
    low, high = 0.0, 1e6
    for _ in range(100):  # halving 1e6 a hundred times is beyond a double's last digit
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < 1 - level else (low, middle)
    return high


def crossed_bootstrap(rows: Sequence[Sequence[float]]) -> Estimate:
    """Interval of the mean of a table, one row a seed and one column a problem: rows and columns are
    drawn again with replacement, each by itself, since every seed met the same problems. It sees
    what t over seeds cannot: that other problems might have said otherwise. With few rows it is too
    narrow in the direction of seeds, which is what t is for."""
    table = np.asarray(rows, dtype=np.float64)
    by_row, by_column = _counts(table.shape[0], 1), _counts(table.shape[1], 2)
    means = np.sort(((by_row @ table) * by_column).sum(axis=1) / table.size)
    cut = CROSSED_RESAMPLES // 40
    low, high = float(means[cut]), float(means[-cut - 1])
    return Estimate(float(table.mean()), low, high, table.shape[0], "crossed bootstrap")


@lru_cache(maxsize=8)
def _counts(size: int, stream: int) -> np.ndarray:
    """How often each of `size` items is drawn, for every resample. Fixed: two calls agree."""
    draw = np.random.Generator(np.random.PCG64([size, stream]))
    return draw.multinomial(size, np.full(size, 1 / size), CROSSED_RESAMPLES).astype(np.float32)


def holm(chances: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm's step-down method): whoever claims only what stays
    at or below 0.05 makes a false claim in at most 5 percent of all such families. The smallest is
    multiplied by n, the next by n - 1, and so on; never less than a smaller one's, never above 1.

    Example: holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(chances)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        largest = max(largest, min(1.0, chances[i] * (len(chances) - rank)))
        corrected[i] = largest
    return corrected


# ---------------------------------------------------------------- learning curves

Points = Sequence[tuple[float, float]]
"""(what was spent, accuracy), by what was spent."""


def mean_height(curve: Points) -> float | None:
    """The area under a curve of straight lines, divided by its width: the mean accuracy on the way.
    None for a curve without width.

    Example: mean_height([(0, 0.0), (10, 0.4), (20, 0.4)]) == 0.3
    """
    if len(curve) < 2 or curve[-1][0] <= curve[0][0]:
        return None
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def first_reach(curve: Points, target: float) -> float | None:
    """What was spent when the curve first reached the target, on the straight line between two
    evaluations; None if it never did.

    Example: first_reach([(0, 0.2), (10, 0.6)], 0.5) == 7.5
    """
    if curve and curve[0][1] >= target:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


# ---------------------------------------------------------------- several attempts at one problem


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The chance that at least one of k attempts, drawn without replacement from `attempts` of which
    `right` are right, is right: 1 - C(n-c, k) / C(n, k), the unbiased estimator of pass@k."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {k} attempts, there are {attempts}")
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The largest reward of the first k attempts. For rewards of 0 and 1 and exactly k attempts it
    is pass@k; with more attempts pass@k has less noise."""
    return max(rewards[:k])


def majority_at_k(votes: Sequence[tuple[str | None, float]], k: int) -> float:
    """The reward of the answer that most of the first k attempts give. `votes` are (answer, reward);
    an attempt without an answer (None) does not vote. Answers are the same if their texts are, white
    space aside; of answers with equally many votes the one seen first wins, with the reward it had
    then. No vote at all is worth 0.

    Example: majority_at_k([("7", 0.0), ("8", 1.0), ("8 ", 1.0)], k=3) == 1.0
    """
    counts: dict[str, int] = {}
    rewards: dict[str, float] = {}
    for answer, reward in votes[:k]:
        if answer is None:
            continue
        text = "".join(answer.split())
        counts[text] = counts.get(text, 0) + 1
        rewards.setdefault(text, reward)
    if not counts:
        return 0.0
    return rewards[max(counts, key=lambda text: counts[text])]  # max keeps the first of equals
