"""Means with 95 percent intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 percent interval.

    Example: Estimate(mean=0.5, low=0.4, high=0.6, count=100)
    """

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Normal interval of the mean of independent values (one value a problem, say). One value has
    no interval: it is then its own."""
    centre = fmean(values)
    half = Z95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(centre, centre - half, centre + half, len(values))
