"""What an update reports, and which rows it can leave out because their share is exactly zero.

A loss sees the model through the log-probabilities alone. Its gradient by them (small: one number a
reply token) therefore says, for any algorithm, which rows the backward through the model would add
nothing for: peers outside the trust interval, own rows where the clip wins, rows of advantage 0.

In units of a forward, a backward costs about 2. A micro-batch of which the share q survives costs 3
if all rows go backward; or 1 + 3q if its graph is thrown away and the survivors alone go forward
again, with backward. The cheaper of the two is taken, so pruning never costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hacrl.types import Batch, LossOutput, Update

Loss = Callable[[Batch, Update], LossOutput]

REPEAT_BELOW = 0.6
"""Survivors' share of a micro-batch's tokens below which they are repeated alone: 2/3 by the count
above, a little less because a small micro-batch costs more a token."""


@dataclass(frozen=True)
class UpdateReport:
    """What one update did.

    Example: UpdateReport(loss=0.01, grad_norm=0.4, kl=0.0, skipped=False, ratios=(1.0, None),
             used=(True, None), learning_rate=1e-6, pruned_forward=1, pruned_backward=0)
    """

    loss: float
    grad_norm: float
    kl: float
    skipped: bool
    """Loss or gradient was not finite; nothing was changed."""
    ratios: tuple[float | None, ...]
    """s of every sample, in the order given; None for those of `pruned_forward`: never computed."""
    used: tuple[bool | None, ...]
    """Whether its gradient survived the clip; None likewise."""
    learning_rate: float
    pruned_forward: int
    """How many samples did not go through the model at all (advantage 0)."""
    pruned_backward: int
    """How many went forward and not backward (gradient exactly 0)."""


def survivors(gradient_BT: Tensor, mask_BT: Tensor) -> list[bool]:
    """Of each row, whether its gradient is anything but exactly zero (nan is)."""
    return ((gradient_BT != 0) & (mask_BT > 0)).any(1).tolist()


def repeat_pays(lengths: Sequence[int], alive: Sequence[bool]) -> bool:
    """Whether the survivors of a micro-batch should go forward again alone.

    Example: repeat_pays([10, 10], [True, False]) is True; all alive: False
    """
    left = sum(n for n, a in zip(lengths, alive, strict=True) if a)
    return left < REPEAT_BELOW * sum(lengths)
