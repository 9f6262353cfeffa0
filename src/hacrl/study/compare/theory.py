"""The checks of the theory (hacrl.study.diagnostics) of one agent under one arm, over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from hacrl.statistics import Estimate, t_interval
from hacrl.study.compare.reading import Reading
from hacrl.study.diagnostics.harm import CHECKED, find_harm

PREFIX = "diagnostics/"


@dataclass(frozen=True)
class Warned:
    """A peer that hurts in the run of one seed.

    Example: Warned(seed=3, peer="finch", sentence="finch hurts wren: ...")
    """

    seed: int
    peer: str
    sentence: str


@dataclass(frozen=True)
class Theory:
    """What the checks found and what they cost.

    Example: Theory(checks=3.0, rollouts=3072.0, seconds=9.1,
             figures={"bias/own": Estimate(0.001, -0.01, 0.012, 5, "t")}, warnings=())
    """

    checks: float
    rollouts: float
    seconds: float
    """Means over seeds, of this agent alone."""
    figures: Mapping[str, Estimate]
    """Every figure of the checks without its prefix: a mean over the checks of each seed, then mean
    and interval over seeds."""
    warnings: tuple[Warned, ...]

    def sources(self, learner: str) -> list[str]:
        """Whose gradients were measured, the learner first."""
        names = (key.partition("/")[2] for key in self.figures if key.startswith("gradient_norm/"))
        return sorted(names, key=lambda name: (name != learner, name))


def theory(readings: Sequence[Reading]) -> Theory | None:
    """None where no seed has a check."""
    checked = [r for r in readings if r.checks]
    if not checked:
        return None
    by_seed = [_means(r.checks) for r in checked]
    keys = list(dict.fromkeys(key for means in by_seed for key in means))
    return Theory(
        checks=fmean(len(r.checks) for r in checked),
        rollouts=fmean(sum(row[CHECKED] for row in r.checks) for r in checked),
        seconds=fmean(r.checking for r in checked),
        figures={key: t_interval([m[key] for m in by_seed if key in m]) for key in keys},
        warnings=tuple(
            Warned(r.cell.seed, harm.peer, harm.sentence)
            for r in checked
            for harm in find_harm(r.cell.config, r.checks)
            if harm.learner == r.agent
        ),
    )


def _means(checks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each figure over the checks that have it."""
    found: dict[str, list[float]] = {}
    for row in checks:
        for key, value in row.items():
            if key.startswith(PREFIX) and value is not None and isfinite(value):
                found.setdefault(key.removeprefix(PREFIX), []).append(value)
    return {key: fmean(values) for key, values in found.items()}
