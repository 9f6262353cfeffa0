"""The tensors of a micro-batch, as a loss gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hacrl.policy.logprobs import Inputs
from hacrl.policy.packing import placed
from hacrl.types import MicroBatch, Sample


@dataclass(frozen=True)
class Divisors:
    """Counts of the whole minibatch; the fields are those of `MicroBatch`.

    Example: Divisors(num_samples=512, num_own=512, num_tokens=410_000, num_own_tokens=410_000)
    """

    num_samples: int
    num_own: int
    num_tokens: int
    num_own_tokens: int


def divisors_of(minibatch: Sequence[Sample]) -> Divisors:
    tokens = [s.num_reply_tokens for s in minibatch]
    own = [n for n, s in zip(tokens, minibatch, strict=True) if s.is_own]
    return Divisors(len(minibatch), len(own), sum(tokens), sum(own))


def make_batch(
    samples: Sequence[Sample],
    inputs: Inputs,
    logprobs_BT: Tensor,
    start_BT: Tensor | None,
    divisors: Divisors,
) -> MicroBatch:
    """`inputs` are made of the samples; `start_BT` is at the start weights, for the KL term."""
    device = logprobs_BT.device

    def column(values: Sequence[float | None]) -> Tensor:
        filled = [float("nan") if v is None else v for v in values]
        return placed(torch.tensor(filled, dtype=torch.float32), device)

    def grid(rows_of_tokens: Sequence[Sequence[float] | None]) -> Tensor | None:
        """Tokens' values in rows padded with 0, nan in a row without; None where no row has any."""
        if all(values is None for values in rows_of_tokens):
            return None
        filled_BT = torch.zeros(inputs.reply_mask_BT.shape)
        for i, values in enumerate(rows_of_tokens):
            if values is None:
                filled_BT[i] = float("nan")
            else:
                filled_BT[i, : len(values)] = torch.tensor(values)
        return placed(filled_BT, device)

    return MicroBatch(
        logprobs_BT=logprobs_BT,
        mask_BT=inputs.reply_mask_BT,
        behaviour_B=column([s.behaviour for s in samples]),
        old_logprobs_BT=grid([s.old_logprobs for s in samples]),
        ref_logprobs_BT=start_BT,
        advantage_B=column([s.advantage for s in samples]),
        weight_B=column([s.weight for s in samples]),
        is_own_B=placed(torch.tensor([s.is_own for s in samples]), device),
        source_logprobs_BT=grid([s.source_logprobs for s in samples]),
        **asdict(divisors),
    )
