"""Bias and variance of a problem's baseline, compared with the learner's expected reward.

Three estimates of the expected reward (the mean of own rewards, the mean of all rewards, and HACPO's
capability-aware mean) are compared with the mean of fresh replies. docs/diagnostics.md, "The baselines",
has the formulas.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev, variance

from hacrl.algorithms.capability import Capability
from hacrl.types import Group

BASELINES = ("own", "pooled", "capability")
CHECKED = "diagnostics/cost/rollouts"  # the metrics rows of a check contain this key: its rollouts


@dataclass(frozen=True)
class Guess:
    """A baseline's value for one problem.

    Example: Guess(value=0.25, variance=0.0261)
    """

    value: float
    variance: float | None  # sampling variance of the value; None if a source has only one reply


def guesses(group: Group, capability: Capability, learner: str) -> dict[str, Guess]:
    """The three baselines of a problem; {} if no reply of the learner was judged. capability is formula
    (7) without the algorithm's special cases (uniform groups, the guard), which change no sign."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for t in group.judged:
        rewards[t.agent].append(t.reward)
    if learner not in rewards:
        return {}
    equal = dict.fromkeys(rewards, 1.0)
    scaled = {source: capability.ratio(learner, source, group.task) for source in rewards}
    return {
        "own": _guess({learner: rewards[learner]}, equal),
        "pooled": _guess(rewards, equal),
        "capability": _guess(rewards, scaled),
    }


def _guess(rewards: Mapping[str, Sequence[float]], weight: Mapping[str, float]) -> Guess:
    count = sum(len(r) for r in rewards.values())
    value = sum(weight[source] * sum(r) for source, r in rewards.items()) / count
    if any(len(r) < 2 for r in rewards.values()):
        return Guess(value, None)
    spread = sum(weight[source] ** 2 * len(r) * variance(r) for source, r in rewards.items())
    return Guess(value, spread / count**2)


def baseline_metrics(
    guessed: Mapping[str, Mapping[str, Guess]], fresh: Mapping[str, Sequence[float]]
) -> dict[str, float | None]:
    """Bias, variance and spread of each baseline over the problems in both arguments; `fresh` holds the
    rewards of fresh replies by problem. A problem counts if it has at least two of them."""
    problems = [p for p in guessed if guessed[p] and len(fresh.get(p, ())) >= 2]
    metrics: dict[str, float | None] = {"diagnostics/fresh/problems": float(len(problems))}
    if not problems:
        return metrics
    truth = {p: fmean(fresh[p]) for p in problems}
    noise = {p: variance(fresh[p]) / len(fresh[p]) for p in problems}
    metrics["diagnostics/fresh/reward"] = fmean(truth.values())
    for name in BASELINES:
        errors = [guessed[p][name].value - truth[p] for p in problems]
        squared = fmean(e * e - noise[p] for e, p in zip(errors, problems, strict=True))
        sampling = [guessed[p][name].variance for p in problems]
        known = [v for v in sampling if v is not None]
        own = fmean(known) if len(known) == len(problems) else None
        metrics |= {
            f"diagnostics/bias/{name}": fmean(errors),
            f"diagnostics/bias_se/{name}": standard_error(errors),
            f"diagnostics/square_error/{name}": squared,
            f"diagnostics/variance/{name}": own,
            f"diagnostics/spread_squared/{name}": None if own is None else squared - own,
        }
    return metrics


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for a single value."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None
