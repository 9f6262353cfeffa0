"""Means with 95 percent intervals, and the figures of repeated attempts: pass@k, best@k, maj@k.

Plain numbers in, plain numbers out; what a reply or a problem is, others know. All of it is
deterministic: the same values in the same order give the same figures, to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from random import Random
from statistics import fmean, stdev

from hacrl.errors import UserError

Z95 = 1.959963984540054
FEW = 100
"""Below so many values that are not all 0 or 1, the interval is a bootstrap."""
RESAMPLES = 10_000


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
    """How the interval was made: normal, wilson or bootstrap."""


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
