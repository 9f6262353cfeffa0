"""The theory checks (hacrl.study.diagnostics) of one agent under one arm, averaged over seeds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from hacrl.statistics import Estimate, t_interval
from hacrl.study.compare.reading import AgentRun
from hacrl.study.diagnostics.baseline import CHECKED

PREFIX = "diagnostics/"


@dataclass(frozen=True)
class TheoryChecks:
    """Results and cost of an agent's checks.

    Example: TheoryChecks(checks=3.0, rollouts=3072.0, seconds=9.1,
             figures={"bias/own": Estimate(0.001, -0.01, 0.012, 5, "t")})
    """

    checks: float
    rollouts: float
    seconds: float  # means over seeds, of this agent only
    figures: Mapping[str, Estimate]
    """Metrics of the checks without their prefix: mean over the checks of each seed, then mean and
    interval over seeds."""

    def sources(self, learner: str) -> list[str]:
        """The sources whose gradients were measured, the learner first."""
        names = (key.partition("/")[2] for key in self.figures if key.startswith("gradient_norm/"))
        return sorted(names, key=lambda name: (name != learner, name))


def theory_checks(agent_runs: Sequence[AgentRun]) -> TheoryChecks | None:
    """The checks of one agent over its seeds; None if no run has any."""
    checked = [r for r in agent_runs if r.checks]
    if not checked:
        return None
    by_seed = [_means(r.checks) for r in checked]
    keys = dict.fromkeys(key for means in by_seed for key in means)
    return TheoryChecks(
        checks=fmean(len(r.checks) for r in checked),
        rollouts=fmean(sum(row[CHECKED] for row in r.checks) for r in checked),
        seconds=fmean(r.check_seconds for r in checked),
        figures={key: t_interval([m[key] for m in by_seed if key in m]) for key in keys},
    )


def _means(checks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each metric over the checks that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in checks:
        for key, value in row.items():
            if key.startswith(PREFIX) and value is not None and isfinite(value):
                found[key.removeprefix(PREFIX)].append(value)
    return {key: fmean(values) for key, values in found.items()}
