"""What an update returns, and the loss of the first update of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from hacrl.types import LossOutput, MicroBatch, Update

Loss = Callable[[MicroBatch, Update], LossOutput]
T = TypeVar("T")


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
class AtScores:
    """A loss evaluated at the log-probabilities that scoring found, with the gradient of the forward.
    For an update at the very weights that scored the rows.

    In half precision a row's rounding depends on the shape of its micro-batch, and updates have other
    micro-batches than scoring. At unchanged weights the difference is rounding only, but it can be
    larger than the clip range of a sequence's ratio and would look like a change of the policy. Rows
    that were not scored are not changed. The log-probabilities at the start weights, of the same
    micro-batch, are shifted too, so that the KL term is that of the forward.

    Example: policy.update(samples, AtScores(algorithm.loss), update) has own ratios of 1
    """

    loss: Loss

    def __call__(self, batch: MicroBatch, update: Update) -> LossOutput:
        found_BT, scored_BT = batch.logprobs_BT, batch.old_logprobs_BT
        if scored_BT is not None:
            gap_BT = (scored_BT - found_BT.detach()).nan_to_num(0.0)  # nan: not scored
            start_BT = batch.ref_logprobs_BT
            batch = replace(
                batch,
                logprobs_BT=found_BT + gap_BT,
                ref_logprobs_BT=None if start_BT is None else start_BT + gap_BT,
            )
        return self.loss(batch, update)
