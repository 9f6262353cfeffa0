"""Means with 95 % intervals over problems and seeds, correction for multiple comparisons, and the
scores of repeated attempts (pass@k, maj@k).

Every function is deterministic: the same values in the same order give the same result. numpy and
scipy are imported on first use, because `hacrl show` must start quickly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, inf, sqrt
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import Any

from hacrl.errors import UserError

Z95 = 1.959963984540054
FEW = 100  # with fewer values than this the interval is a bootstrap, unless all values are 0 or 1
RESAMPLES = 10_000
CROSSED_RESAMPLES = 4_000
LEVEL = 0.05  # error rate of the 95 % intervals and of Holm's correction


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval.

    Example: Estimate(mean=0.5, low=0.4, high=0.6, count=100)
    """

    mean: float
    low: float
    high: float
    count: int
    method: str = "normal"
    """How the interval was computed: normal, wilson, bootstrap, t, or crossed bootstrap."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values (one per problem) with the normal interval. A single value gets an
    interval of width 0."""
    centre = fmean(values)
    half = Z95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(centre, centre - half, centre + half, len(values))


def estimate_rewards(values: Sequence[float]) -> Estimate:
    """Mean of rewards (one per problem) with the normal interval, or with Wilson's if all are 0 or all
    are 1, because the normal interval would have width 0 then."""
    extreme = set(values) in ({0.0}, {1.0})
    return wilson(round(sum(values)), len(values)) if extreme else estimate(values)


def wilson(right: int, count: int) -> Estimate:
    """A fraction with Wilson's score interval, which also works for few problems and for 0 % or
    100 %, where the normal interval has width 0."""
    from scipy.stats import binomtest

    found = binomtest(right, count).proportion_ci(method="wilson")
    return Estimate(right / count, float(found.low), float(found.high), count, "wilson")


def bootstrap(values: Sequence[float]) -> Estimate:
    """Mean with the percentile bootstrap interval (10,000 resamples, fixed seed). The interval stays
    inside the range of the values."""
    draw = Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return Estimate(fmean(values), means[cut], means[-cut - 1], len(values), "bootstrap")


def estimate_scores(values: Sequence[float]) -> Estimate:
    """Mean of scores in [0, 1], one per problem: Wilson's interval if every score is 0 or 1, else
    bootstrap below 100 problems and normal from 100 on."""
    if all(v in (0.0, 1.0) for v in values):
        return wilson(round(sum(values)), len(values))
    return bootstrap(values) if len(values) < FEW else estimate(values)


def compare_paired(a: Mapping[str, float], b: Mapping[str, float]) -> Estimate:
    """Mean of b - a over the problems in both, with its interval over problems (bootstrap below 100
    problems, normal from 100 on); `count` is their number. The paired interval is narrower than that
    of two separate means.

    Example: compare_paired({"p": 0.0, "q": 1.0}, {"p": 1.0, "q": 1.0, "r": 0.0}).mean == 0.5
    """
    both = sorted(a.keys() & b.keys())
    if not both:
        raise UserError("the two evaluations have no problem in common, so they cannot be compared")
    differences = [b[p] - a[p] for p in both]
    return bootstrap(differences) if len(both) < FEW else estimate(differences)


# ---------------------------------------------------------------- a few seeds


def t_interval(values: Sequence[float]) -> Estimate:
    """Mean of a few independent values (one per seed) with Student's t interval. The interval of a
    single value is infinite."""
    centre, count = fmean(values), len(values)
    half = t_quantile(count - 1) * stdev(values) / sqrt(count) if count > 1 else inf
    return Estimate(centre, centre - half, centre + half, count, "t")


def t_test(values: Sequence[float]) -> float:
    """Two-sided p value for "the true mean is 0". It is below 0.05 exactly when t_interval excludes
    zero; 1.0 for a single value."""
    from scipy.special import stdtr

    if len(values) < 2:
        return 1.0
    centre, spread = fmean(values), stdev(values)
    if spread == 0:
        return 1.0 if centre == 0 else 0.0
    return 2 * float(stdtr(len(values) - 1, -abs(centre) / (spread / sqrt(len(values)))))


@lru_cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with P(|T| <= t) = 1 - level: 12.706, 4.303, 3.182, 2.776 for 1 to 4 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))


def crossed_bootstrap(rows: Sequence[Sequence[float]]) -> Estimate:
    """Mean of a table (one row per seed, one column per problem) with an interval from resampling
    rows and columns independently, because every seed has the same problems. It covers the choice of
    problems, which t over seeds does not. With few rows it underestimates the variation over seeds,
    which t covers."""
    import numpy as np

    table = np.asarray(rows, dtype=np.float64)
    by_row, by_column = resample_counts(table.shape[0], 1), resample_counts(table.shape[1], 2)
    means = np.sort(((by_row @ table) * by_column).sum(axis=1) / table.size)
    cut = CROSSED_RESAMPLES // 40
    low, high = float(means[cut]), float(means[-cut - 1])
    return Estimate(float(table.mean()), low, high, table.shape[0], "crossed bootstrap")


def bootstrap_test(e: Estimate) -> float:
    """Two-sided p value for "the true mean is 0" from the width of a 95 % bootstrap interval, as of a
    normal distribution.

    Example: bootstrap_test(Estimate(0.02, 0.0, 0.04, 8, "crossed bootstrap")) is 0.05
    """
    error = (e.high - e.low) / (2 * Z95)
    if error == 0:
        return 1.0 if e.mean == 0 else 0.0
    return 2 * NormalDist().cdf(-abs(e.mean) / error)


@lru_cache(maxsize=8)
def resample_counts(size: int, stream: int) -> Any:
    """For each resample, how often each of `size` items is drawn. The seed is fixed."""
    import numpy as np

    draw = np.random.Generator(np.random.PCG64([size, stream]))
    return draw.multinomial(size, np.full(size, 1 / size), CROSSED_RESAMPLES).astype(np.float32)


def holm(chances: Sequence[float]) -> list[float]:
    """p values corrected for multiple comparisons by Holm's step-down method. Claiming only those at
    or below 0.05 makes any false claim with probability at most 5 %.

    Example: holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(chances)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        largest = max(largest, min(1.0, chances[i] * (len(chances) - rank)))
        corrected[i] = largest
    return corrected


# ---------------------------------------------------------------- several attempts at one problem


def expected_best(rewards: Sequence[float]) -> float:
    """The expected largest of n draws with replacement from n rewards.

    Example: expected_best([1.0, 0.0]) == 0.75
    """
    count = len(rewards)
    chances = [(i / count) ** count for i in range(count + 1)]  # all draws are among the i smallest
    gains = zip(sorted(rewards), chances, chances[1:], strict=False)
    return sum(reward * (high - low) for reward, low, high in gains)


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Unbiased pass@k: the probability that k of the attempts, drawn without replacement, include a
    right one: 1 - C(n-c, k) / C(n, k)."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {k} attempts, there are {attempts}")
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


def majority(votes: Sequence[tuple[str | None, float]]) -> float:
    """The reward of the most frequent answer. `votes` are (answer, reward). None is no vote; white space
    is ignored; a tie goes to the answer seen first, with its first reward. Without any vote the result
    is 0.

    Example: majority([("7", 0.0), ("8", 1.0), ("8 ", 1.0)]) == 1.0
    """
    named = [("".join(answer.split()), reward) for answer, reward in votes if answer is not None]
    if not named:
        return 0.0
    (winner, _), *_ = Counter(text for text, _ in named).most_common(1)  # ties: insertion order
    return next(reward for text, reward in named if text == winner)
