"""The numbers of a step. Everything here is a function of rollouts, samples and update reports, so a
resumed run writes the same numbers; times live in a file of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from hacrl.capability import Capability
from hacrl.plan import Plan
from hacrl.policy.policy import UpdateReport
from hacrl.types import Finish, Rollout, Sample, Status, Update

Done = Sequence[tuple[Update, Sequence[Sample], UpdateReport]]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def rollout_metrics(rollouts: Sequence[Rollout], too_long: int) -> dict[str, Any]:
    """Own rewards, verdicts and lengths."""
    verdicts = [r.verdict for r in rollouts if r.verdict is not None]
    counts = Counter(v.status for v in verdicts)
    judged = [v.reward for v in verdicts if v.judged]
    cut_off = [r.completion.finish is Finish.LENGTH for r in rollouts]
    return {
        "reward": _mean(judged),
        "rollouts": len(rollouts),
        "not_attempted": too_long,
        **{f"verdict/{status.value}": counts[status] for status in Status},
        "reply_tokens": _mean([len(r.completion.token_ids) for r in rollouts]),
        "truncated": _mean([float(c) for c in cut_off]),
        "not_shareable": sum(not r.shareable for r in rollouts),
        "behaviour_logprob": _mean([r.mean_logprob for r in rollouts]),
    }


def agreement_facts(sampled: Sequence[Rollout], scored: Sequence[Rollout]) -> dict[str, float]:
    """How far the sampler's mean log-probabilities lie from the trainer's, sequence by sequence."""
    gaps = [abs(a.mean_logprob - b.mean_logprob) for a, b in zip(sampled, scored, strict=True)]
    return {"agreement/max_gap": max(gaps, default=0.0), "agreement/mean_gap": _mean(gaps) or 0.0}


def learning_metrics(
    done: Done, plan: Plan, capability: Capability, members: Sequence[str], learner: str
) -> dict[str, Any]:
    """What the updates of a step did, for own samples and for each source."""
    rows = [
        (update, sample, report.ratios[i], report.used[i])
        for update, batch, report in done
        for i, sample in enumerate(batch)
    ]
    own = [r for r in rows if r[1].is_own]
    peers = [r for r in rows if not r[1].is_own]
    metrics: dict[str, Any] = {
        "loss": _mean([report.loss for _, _, report in done]),
        "grad_norm": _mean([report.grad_norm for _, _, report in done]),
        "kl": _mean([report.kl for _, _, report in done]),
        "learning_rate": done[-1][2].learning_rate if done else None,
        "updates": sum(not report.skipped for _, _, report in done),
        "updates_planned": len(plan.floors),
        "updates_skipped": sum(report.skipped for _, _, report in done),
        "own/samples": len(own),
        "own/advantage_zero": _mean([float(s.advantage == 0) for _, s, _, _ in own]),
        "own/clipped": _mean([float(not used) for _, _, _, used in own]),
        "own/ratio": _mean([ratio for _, _, ratio, _ in own]),
        "peers/samples": len(peers),
    }
    if peers:
        metrics |= {
            "peers/below_floor": _mean([float(r < u.floor) for u, _, r, _ in peers]),
            "peers/above_one": _mean([float(r > 1) for _, _, r, _ in peers]),
            "peers/used": _mean([float(used) for _, _, _, used in peers]),
            "peers/effective_samples": effective_samples(
                [ratio * s.weight if used else 0.0 for _, s, ratio, used in peers]
            ),
        }
    for source in members:
        metrics[f"capability/{source}"] = capability.of(source)
        if source != learner and (theirs := [r for r in peers if r[1].source == source]):
            metrics[f"weight/{source}"] = _mean([s.weight for _, s, _, _ in theirs])
            metrics |= _ratio_by_length(source, [(s.num_reply_tokens, r) for _, s, r, _ in theirs])
    return metrics


def _ratio_by_length(source: str, pairs: Sequence[tuple[int, float]]) -> Mapping[str, Any]:
    """Mean s of a source, of its short and its long answers (split at the median)."""
    middle = median(length for length, _ in pairs)
    return {
        f"ratio/{source}": _mean([r for _, r in pairs]),
        f"ratio/{source}/short": _mean([r for length, r in pairs if length <= middle]),
        f"ratio/{source}/long": _mean([r for length, r in pairs if length > middle]),
    }


def effective_samples(weights: Sequence[float]) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted samples these are worth."""
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / squares if squares else 0.0
