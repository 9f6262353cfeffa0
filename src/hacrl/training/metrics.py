"""The numbers of a step. Everything here is a function of rollouts, samples and update reports, so a
resumed run writes the same numbers; times live in a file of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from hacrl.algorithms.capability import Capability
from hacrl.policy.update import UpdateReport
from hacrl.training.plan import Plan
from hacrl.types import Finish, Rollout, Sample, Status, Update

Done = Sequence[tuple[Update, Sequence[Sample], UpdateReport]]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


@dataclass(frozen=True)
class _Row:
    """A sample in an update, as the model saw it."""

    sample: Sample
    floor: float
    ratio: float
    used: bool
    weight: float
    """Of a peer's sample, in the loss."""


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
    done: Done,
    plan: Plan,
    capability: Capability,
    members: Sequence[str],
    learner: str,
    *,
    by_ratio: bool = True,
) -> dict[str, Any]:
    """What the updates of a step did, for own samples and for each source.

    A ratio, and whether the clip left a gradient, are known of the samples that went forward; means
    and shares of them are over those. The samples without (advantage 0, see `prune`) are counted in
    pruned/forward. own/clipped_first is of the first update alone, at the weights that wrote the
    replies, and so 0, but for rounding where the trainer did not score them in this process (a
    resumed step, or behaviour = "sampler"); None where that update has no own samples.
    peers/forwarded says over how many peers' samples their shares are. Norms of gradients are before
    clipping, also for each part of the plan (own, peers, mixed). by_ratio: the loss weighs a peer's
    sample by ratio times weight; else by its weight alone.
    """
    samples = [s for _, batch, _ in done for s in batch]
    own = [s for s in samples if s.is_own]
    rows = _forwarded(done, by_ratio)
    mine = [r for r in rows if r.sample.is_own]
    peers = [r for r in rows if not r.sample.is_own]
    metrics: dict[str, Any] = {
        "loss": _mean([report.loss for _, _, report in done]),
        "grad_norm": _mean([report.grad_norm for _, _, report in done]),
        "kl": _mean([report.kl for _, _, report in done]),
        "learning_rate": done[-1][2].learning_rate if done else None,
        "updates": sum(not report.skipped for _, _, report in done),
        "updates_planned": len(plan.floors),
        "updates_skipped": sum(report.skipped for _, _, report in done),
        "pruned/forward": sum(report.pruned_forward for _, _, report in done),
        "pruned/backward": sum(report.pruned_backward for _, _, report in done),
        "own/samples": len(own),
        "own/advantage_zero": _mean([float(s.advantage == 0) for s in own]),
        "own/clipped": _mean([float(not r.used) for r in mine]),
        "own/clipped_first": _mean(
            [float(not r.used) for r in _forwarded(done[:1]) if r.sample.is_own]
        ),
        "own/ratio": _mean([r.ratio for r in mine]),
        "peers/samples": len(samples) - len(own),
    }
    for part in dict.fromkeys(update.part for update, _, _ in done):
        norms = [report.grad_norm for update, _, report in done if update.part == part]
        metrics[f"{part}/grad_norm"] = _mean(norms)
    if len(samples) > len(own):
        metrics |= {
            "peers/forwarded": len(peers),
            "peers/below_floor": _mean([float(r.ratio < r.floor) for r in peers]),
            "peers/above_one": _mean([float(r.ratio > 1) for r in peers]),
            "peers/used": _mean([float(r.used) for r in peers]),
            "peers/effective_samples": effective_samples(_weights(peers)),
        }
    for source in members:
        metrics[f"capability/{source}"] = capability.of(source)
        if source != learner and (theirs := [s for s in samples if s.source == source]):
            metrics[f"weight/{source}"] = _mean([s.weight for s in theirs])
            seen = [r for r in peers if r.sample.source == source]
            metrics |= _ratio_by_length(source, seen)
            metrics[f"peers/used/{source}"] = _mean([float(r.used) for r in seen])
            metrics[f"peers/effective/{source}"] = _effective_share(seen)
    return metrics


def _forwarded(done: Done, by_ratio: bool = True) -> list[_Row]:
    """The samples of which the updates know the ratio."""
    rows = []
    for update, batch, report in done:
        for sample, ratio, used in zip(batch, report.ratios, report.used, strict=True):
            if ratio is not None and used is not None:
                weight = ratio * sample.weight if by_ratio else sample.weight
                rows.append(_Row(sample, update.floor, ratio, used, weight))
    return rows


def _weights(rows: Sequence[_Row]) -> list[float]:
    """What each peer's sample weighs in the loss: 0 where the clip took its gradient."""
    return [r.weight if r.used else 0.0 for r in rows]


def _effective_share(rows: Sequence[_Row]) -> float | None:
    """Effective samples over samples."""
    return effective_samples(_weights(rows)) / len(rows) if rows else None


def _ratio_by_length(source: str, rows: Sequence[_Row]) -> Mapping[str, Any]:
    """Mean s of a source, of its short and its long answers (split at the median)."""
    pairs = [(r.sample.num_reply_tokens, r.ratio) for r in rows]
    middle = median([length for length, _ in pairs] or [0])
    return {
        f"ratio/{source}": _mean([r for _, r in pairs]),
        f"ratio/{source}/short": _mean([r for length, r in pairs if length <= middle]),
        f"ratio/{source}/long": _mean([r for length, r in pairs if length > middle]),
    }


def effective_samples(weights: Sequence[float]) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted samples these are worth."""
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / squares if squares else 0.0


def sample_rows(done: Done) -> list[dict[str, Any]]:
    """Return one row per training sample, for `hacrl samples RUN`. Ratio and used are null where
    the sample did not go through the model (advantage 0, `prune`)."""
    return [
        {
            "problem": s.problem_id,
            "source": s.source,
            "index": s.index,
            "advantage": s.advantage,
            "weight": s.weight,
            "ratio": report.ratios[i],
            "used": report.used[i],
            "update": update.index,
            "floor": update.floor,
        }
        for update, batch, report in done
        for i, s in enumerate(batch)
    ]
