"""Bias and variance of a problem's baseline, against what the learner really scores on it.

Learner k, problem q, p_k(q) = the learner's expected reward on q, its estimate p^ the mean of m fresh
replies that no baseline has seen. Three guesses at p_k(q) from the N judged rewards of the step's cut:

    own(q)        = mean of the learner's own rewards
    pooled(q)     = mean of everybody's rewards
    capability(q) = sum_j sum_i w(k,j) R(y_j,i) / N                            (eq. 7 of HACPO)

The theorem says that capability is unbiased: E[mu_k] = E[R of the learner]. With w(k,j) = P_k / P_j it
holds on the mean over problems, not problem by problem: where j is relatively better than its ratio
tells, the guess is too high. So three figures, e(q) = guess(q) - p^(q):

    bias     mean over problems of e, with its standard error
    variance mean over problems of the guess's own sampling variance, sum_j w(k,j)^2 n_j s_j^2(q) / N^2
             (s_j^2: variance of j's rewards on q, ddof 1; w taken as given)
    spread^2 mean over problems of (e^2 - s^2(q) / m) - variance: the squared bias of a single problem

where s^2(q) / m is the noise of p^. mean square error = variance + spread^2, both without that noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev, variance

from hacrl.algorithms.capability import Capability
from hacrl.types import Group

BASELINES = ("own", "pooled", "capability")


@dataclass(frozen=True)
class Guess:
    """A baseline's value for one problem.

    Example: Guess(value=0.25, variance=0.0261)
    """

    value: float
    variance: float | None
    """Of the value, over other draws of the same replies; None where a source has one reply."""


def guesses(group: Group, capability: Capability, learner: str) -> dict[str, Guess]:
    """Every baseline of the problem; none where nothing of the learner was judged. Formula (7) as it
    stands: the algorithm's answer for uniform groups and its guard change no advantage's sign."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for t in group.judged:
        rewards[t.agent].append(t.reward)
    if learner not in rewards:
        return {}
    even = dict.fromkeys(rewards, 1.0)
    scaled = {source: capability.ratio(learner, source, group.task) for source in rewards}
    return {
        "own": _guess({learner: rewards[learner]}, even),
        "pooled": _guess(rewards, even),
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
    """Bias, variance and spread of each baseline over the problems that both know; `fresh` holds
    rewards of fresh replies by problem, at least two of each."""
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
    """Of the mean of independent values; one value has none."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None
