"""What an update returns, and the loss in half precision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, TypeVar

from hacrl.types import LossOutput, MicroBatch, Update

Loss = Callable[[MicroBatch, Update], LossOutput]
T = TypeVar("T")
SAFETY = 1.5
"""The measured rounding may be too small: its mean square may be this many times as large."""


class Sums(NamedTuple):
    """The results of all micro-batches; the fields are those of `UpdateReport`."""

    loss: float
    kl: float
    ratios: Sequence[float | None]
    weights: Sequence[float | None]


def merge_rows(parts: Sequence[Sequence[T | None]]) -> list[Any]:
    """Of each row the value of the rank that has one.

    Example: merge_rows([[0.9, None], [None, 1.1]]) == [0.9, 1.1]
    """
    return [next((v for v in values if v is not None), None) for values in zip(*parts, strict=True)]


@dataclass(frozen=True)
class UpdateReport:
    """The result of one update.

    Example: UpdateReport(loss=0.01, grad_norm=0.4, kl=0.0, skipped=False, ratios=(1.0, None),
             weights=(0.9, None), learning_rate=1e-6)
    """

    loss: float
    grad_norm: float  # before clipping
    kl: float
    skipped: bool  # loss or gradient was not finite; nothing was changed
    ratios: tuple[float | None, ...]
    """The ratio s of every sample, in the order given; None for those that were skipped (advantage
    0)."""
    weights: tuple[float | None, ...]
    """The factor of every sample's gradient (`LossOutput.weight_B`), 0 if a clip removed it; None
    likewise."""
    learning_rate: float


@dataclass(frozen=True)
class WithoutRounding:
    """A loss for half precision. Its ratios change by what rounding cannot explain.

    In half precision, one changed bit of one weight changes the rounding of the whole forward pass. The
    mean log-probability of a sequence then moves by more than GSPO's clip range, although the policy is
    practically the same. So each change since scoring is multiplied by `kept`, the fraction of the mean
    square change in the micro-batch that rounding cannot explain:

        kept  = max(0, 1 - bound / mean of change^2)
        bound = SAFETY * (1 + 3 * sqrt(2 / n)) * mean of rounding^2,    rounding = noise / sqrt(tokens)

    The mean square of n normal values has a relative standard deviation of sqrt(2 / n), so normal
    rounding rarely exceeds the bound, and then little of it is kept. docs/models.md has figures for a
    pretrained model. n counts rows by the weight of their rounding. At the weights that scored, `noise`
    is infinite: the whole change is rounding, and kept = 0. Rows without scores keep their
    log-probabilities. Only values are shifted: the gradient is that of the forward pass. The
    log-probabilities at the start weights get the same shift, so the KL term does not change.

    A micro-batch of few rows has a wide bound and keeps less of a real change, so the fraction of own
    samples that are clipped depends on `microbatch_tokens` and `ranks`: large micro-batches are better.

    Example: changes of 0.4 and -0.2 in rows of 4 tokens, noise 0.1: n = 2, bound = 1.5 * 4 * 0.0025, so
    kept = 1 - 0.015 / 0.1 = 0.85
    """

    loss: Loss
    noise: float = inf  # standard deviation of the rounding of one token's log-probability

    def __call__(self, batch: MicroBatch, update: Update) -> LossOutput:
        found_BT, scored_BT = batch.logprobs_BT, batch.old_logprobs_BT
        if scored_BT is not None:
            has_scores_B = scored_BT[:, 0].isfinite()
            gap_BT = (scored_BT - found_BT.detach()).nan_to_num(0.0)
            tokens_B = batch.mask_BT.sum(1)
            change_B = (gap_BT * batch.mask_BT).sum(1) / tokens_B
            per_row_B = (1 / tokens_B).where(has_scores_B, 0.0)
            rows = per_row_B.sum().square() / per_row_B.square().sum()
            bound = SAFETY * (1 + 3 * (2 / rows).sqrt()) * self.noise**2 * per_row_B.sum()
            explained = bound / change_B.square().sum()
            # nan: no change, or no row with scores
            shift_BT = gap_BT * explained.nan_to_num(1.0).clamp(max=1.0)
            start_BT = batch.ref_logprobs_BT
            batch = replace(
                batch,
                logprobs_BT=found_BT + shift_BT,
                ref_logprobs_BT=None if start_BT is None else start_BT + shift_BT,
            )
        return self.loss(batch, update)
