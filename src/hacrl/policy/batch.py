"""The tensors of a micro-batch: what the model reads (`Inputs`) and what a loss gets (`MicroBatch`).

Axis suffixes: B sequences, T reply tokens (padded right), N tokens of all sequences in one row, F tokens
of all sequences with shared prompts repeated, M scored tokens.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacrl.policy.packing import Layout, pack, to_device
from hacrl.types import MicroBatch, Sample


@dataclass(frozen=True)
class Inputs:
    """Sequences ready for a forward pass.

    Example: make_inputs([[5, 6, 7], [8, 9]], [[0, 1, 1], [0, 1]], pad_id=0, device=cpu) has
    ids_N = 5 6 7 8 9, position_N = 0 1 2 0 1, predictor_M = 0 1 3, target_M = 6 7 9
    """

    layout: Layout  # where the sequences are in the row
    ids_N: Tensor
    position_N: Tensor  # position of each token in its sequence
    reply_mask_BT: Tensor  # 1.0 for a reply token, 0.0 for padding
    row_M: Tensor  # sequence of each scored token
    slot_M: Tensor  # its index among the sequence's scored tokens
    predictor_M: Tensor  # the token before it, whose hidden state predicts it: an index into N
    target_M: Tensor  # its id
    pad_id: int


def make_inputs(
    token_ids: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
    *,
    share: bool = False,
) -> Inputs:
    """Put sequences into one row. With `share`, sequences with the same tokens before their first scored
    token share these: they are in the row once."""
    prompts = [mask.index(1) if 1 in mask else 0 for mask in loss_masks]
    layout = pack(token_ids, prompts if share else None)
    scored = [sum(mask) for mask in loss_masks]
    counts_B = torch.tensor(scored)
    ids_F = _joined((array("q", row) for row in token_ids), torch.int64)
    position_F = torch.cat([torch.arange(n) for n in layout.lengths])
    scored_M = _joined(map(bytes, loss_masks), torch.uint8).nonzero().squeeze(1)
    ids_N, position_N = ids_F.new_empty(layout.tokens), position_F.new_empty(layout.tokens)
    ids_N[layout.index_F], position_N[layout.index_F] = ids_F, position_F
    row_M = torch.arange(len(scored)).repeat_interleave(counts_B)
    slot_M = torch.cat([torch.arange(n) for n in scored])
    reply_mask_BT = (torch.arange(max(scored)) < counts_B.unsqueeze(1)).float()
    return Inputs(
        layout=layout,
        ids_N=to_device(ids_N, device),
        position_N=to_device(position_N, device),
        reply_mask_BT=to_device(reply_mask_BT, device),
        row_M=to_device(row_M, device),
        slot_M=to_device(slot_M, device),
        predictor_M=to_device(layout.index_F[scored_M - 1], device),
        target_M=to_device(ids_F[scored_M], device),
        pad_id=pad_id,
    )


def _joined(rows: Iterable["bytes | array[Any]"], dtype: torch.dtype) -> Tensor:
    """Numbers in one tensor. Rows are arrays: torch.tensor is eight times slower on a list."""
    return torch.frombuffer(bytearray().join(rows), dtype=dtype)


def divisors_of(minibatch: Sequence[Sample]) -> dict[str, int]:
    """The counts of a whole minibatch that its micro-batches divide by; the keys are fields of
    `MicroBatch`.

    Example: {"num_samples": 512, "num_own": 512, "num_tokens": 410_000, "num_own_tokens": 410_000}
    """
    tokens = [s.num_reply_tokens for s in minibatch]
    own = [n for n, s in zip(tokens, minibatch, strict=True) if s.is_own]
    return {
        "num_samples": len(minibatch),
        "num_own": len(own),
        "num_tokens": sum(tokens),
        "num_own_tokens": sum(own),
    }


def make_batch(
    samples: Sequence[Sample],
    inputs: Inputs,
    logprobs_BT: Tensor,
    start_BT: Tensor | None,
    divisors: Mapping[str, int],
) -> MicroBatch:
    """What the loss gets. `inputs` are of the same samples; `start_BT` are the log-probabilities at the
    start weights, for the KL term."""
    device = logprobs_BT.device

    def column(values: Sequence[float | None]) -> Tensor:
        filled = [float("nan") if v is None else v for v in values]
        return to_device(torch.tensor(filled, dtype=torch.float32), device)

    def grid(rows_of_tokens: Sequence[Sequence[float] | None]) -> Tensor | None:
        """Token values in rows padded with 0; a row without values is nan; None if no row has values."""
        if all(values is None for values in rows_of_tokens):
            return None
        filled_BT = torch.zeros(inputs.reply_mask_BT.shape)
        for i, values in enumerate(rows_of_tokens):
            if values is None:
                filled_BT[i] = float("nan")
            else:
                filled_BT[i, : len(values)] = _joined([array("f", values)], torch.float32)
        return to_device(filled_BT, device)

    return MicroBatch(
        logprobs_BT=logprobs_BT,
        mask_BT=inputs.reply_mask_BT,
        behaviour_B=column([s.behaviour for s in samples]),
        old_logprobs_BT=grid([s.old_logprobs for s in samples]),
        ref_logprobs_BT=start_BT,
        advantage_B=column([s.advantage for s in samples]),
        weight_B=column([s.weight for s in samples]),
        is_own_B=to_device(torch.tensor([s.is_own for s in samples]), device),
        source_logprobs_BT=grid([s.source_logprobs for s in samples]),
        **divisors,
    )
