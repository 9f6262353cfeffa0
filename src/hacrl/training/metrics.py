"""The metrics of a step.

All are functions of rollouts, samples and update reports, so a resumed run writes the same numbers.
Times are in a separate file.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hacrl.algorithms.capability import Capability
from hacrl.policy.update import UpdateReport
from hacrl.replies import FIRST_FAILURE, mean_parts
from hacrl.training.plan import Plan
from hacrl.types import Finish, Rollout, Sample, Status, Update
from hacrl.verify.protocol import first_failure

Done = Sequence[tuple[Update, Sequence[Sample], UpdateReport]]
"""The updates of a step with their samples and reports."""


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def rollout_metrics(rollouts: Sequence[Rollout], too_long: int) -> dict[str, Any]:
    """Own rewards, verdicts and lengths."""
    verdicts = [r.verdict for r in rollouts if r.verdict is not None]
    counts = Counter(v.status for v in verdicts)
    parts = [part for verdict in verdicts for part in verdict.parts]
    return {
        "reward": _mean(v.reward for v in verdicts if v.judged),
        **{f"reward/{name}": mean for name, mean in mean_parts(parts).items()},
        "rollouts": len(rollouts),
        "not_attempted": too_long,
        **{f"verdict/{status.value}": counts[status] for status in Status},
        **({FIRST_FAILURE: first} if (first := first_failure(verdicts)) else {}),
        "reply_tokens": _mean(len(r.completion.token_ids) for r in rollouts),
        "truncated": _mean(r.completion.finish is Finish.LENGTH for r in rollouts),
        "not_shareable": sum(not r.shareable for r in rollouts),
        "behaviour_logprob": _mean(r.mean_logprob for r in rollouts),
    }


@dataclass(frozen=True)
class _Row:
    """A sample that went through the model in an update."""

    sample: Sample
    floor: float
    ratio: float
    weight: float  # the factor of its gradient, without the advantage

    @property
    def used(self) -> bool:
        return self.weight != 0


def _rows(done: Done) -> list[_Row]:
    return [
        _Row(sample, update.floor, ratio, weight)
        for update, batch, report in done
        for sample, ratio, weight in zip(batch, report.ratios, report.weights, strict=True)
        if ratio is not None and weight is not None
    ]


def learning_metrics(
    done: Done,
    plan: Plan,
    capability: Capability,
    members: Sequence[str],
    learner: str,
) -> dict[str, Any]:
    """What the updates of a step did, for own samples and for each source.

    Ratios and clips are known only of samples that went through the model. Samples with advantage 0 do
    not: pruned/forward counts them, and peers/forwarded counts the other peers' samples.
    own/clipped_first is of the first update, at the weights that sampled, so it is 0 but for rounding;
    None if that update has no own samples. Gradient norms are before clipping.
    """
    reports = [report for _, _, report in done]
    samples = [s for _, batch, _ in done for s in batch]
    own = [s for s in samples if s.is_own]
    rows = _rows(done)
    mine = [r for r in rows if r.sample.is_own]
    peers = [r for r in rows if not r.sample.is_own]
    metrics: dict[str, Any] = {
        "loss": _mean(report.loss for report in reports),
        "grad_norm": _mean(report.grad_norm for report in reports),
        "kl": _mean(report.kl for _, batch, report in done if any(s.is_own for s in batch)),
        "learning_rate": reports[-1].learning_rate if reports else None,
        "updates": sum(not report.skipped for report in reports),
        "updates_planned": len(plan.floors),
        "updates_skipped": sum(report.skipped for report in reports),
        "pruned/forward": sum(report.ratios.count(None) for report in reports),
        "own/samples": len(own),
        "own/advantage_zero": _mean(s.advantage == 0 for s in own),
        "own/clipped": _mean(not r.used for r in mine),
        "own/clipped_first": _mean(not r.used for r in _rows(done[:1]) if r.sample.is_own),
        "own/ratio": _mean(r.ratio for r in mine),
        "peers/samples": len(samples) - len(own),
    }
    for part in dict.fromkeys(update.part for update, _, _ in done):
        norms = (report.grad_norm for update, _, report in done if update.part == part)
        metrics[f"{part}/grad_norm"] = _mean(norms)
    if len(samples) > len(own):
        metrics |= {
            "peers/forwarded": len(peers),
            "peers/below_floor": _mean(r.ratio < r.floor for r in peers),
            "peers/above_one": _mean(r.ratio > 1 for r in peers),
            "peers/used": _mean(r.used for r in peers),
            "peers/effective_samples": effective_samples([r.weight for r in peers]),
        }
    for source in members:
        metrics[f"capability/{source}"] = capability.of(source)
        if source != learner and (theirs := [s for s in samples if s.source == source]):
            metrics[f"weight/{source}"] = _mean(s.weight for s in theirs)
            metrics |= _source_metrics(source, [r for r in peers if r.sample.source == source])
    return metrics


def _source_metrics(source: str, rows: Sequence[_Row]) -> dict[str, Any]:
    """The mean ratio of a peer's samples, and how many of them count."""
    effective = effective_samples([r.weight for r in rows])
    return {
        f"ratio/{source}": _mean(r.ratio for r in rows),
        f"peers/used/{source}": _mean(r.used for r in rows),
        f"peers/effective/{source}": effective / len(rows) if rows else None,
    }


def effective_samples(weights: Sequence[float]) -> float:
    """(sum w)^2 / sum w^2: the number of equally weighted samples with the same variance."""
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / squares if squares else 0.0


def sample_rows(done: Done) -> list[dict[str, Any]]:
    """Return one row per training sample, for `hacrl samples RUN`. Ratio and used are null where
    the sample did not go through the model (advantage 0)."""
    return [
        {
            "problem": s.problem_id,
            "source": s.source,
            "index": s.index,
            "advantage": s.advantage,
            "weight": s.weight,
            "ratio": report.ratios[i],
            "used": None if (weight := report.weights[i]) is None else weight != 0,
            "update": update.index,
            "floor": update.floor,
        }
        for update, batch, report in done
        for i, s in enumerate(batch)
    ]
