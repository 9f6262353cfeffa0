"""Token log-probabilities of given sequences, without a full [tokens x vocabulary] tensor.

Axis suffixes: B sequences, L tokens (prompt and reply, padded right), T reply tokens, N scored
tokens of all rows in one line, D hidden size, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Largest logits tensor held at once, in elements, by device (128 MB and 2 GB in float32): small
chunks keep a CPU's caches warm, large ones a GPU busy."""


@dataclass(frozen=True)
class Rows:
    """Sequences ready for a forward pass."""

    ids_BL: Tensor
    attention_BL: Tensor
    reply_mask_BT: Tensor
    """1.0 for a reply token, in reply order."""
    row_N: Tensor
    """Row of each scored token."""
    position_N: Tensor
    """Its position in the row."""
    slot_N: Tensor
    """Its place among the row's reply tokens."""


def make_rows(
    token_ids: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
) -> Rows:
    ids = [torch.tensor(row, dtype=torch.long) for row in token_ids]
    masks = [torch.tensor(row, dtype=torch.bool) for row in loss_masks]
    lengths = torch.tensor([len(row) for row in token_ids])
    ids_BL = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    mask_BL = pad_sequence(masks, batch_first=True, padding_value=False)
    attention_BL = (torch.arange(ids_BL.shape[1]) < lengths.unsqueeze(1)).long()
    row_N, position_N = mask_BL.nonzero(as_tuple=True)
    slot_N = (mask_BL.cumsum(1) - 1)[row_N, position_N]
    counts_B = mask_BL.sum(1)
    reply_mask_BT = (torch.arange(int(counts_B.max())) < counts_B.unsqueeze(1)).float()
    return Rows(
        *(t.to(device) for t in (ids_BL, attention_BL, reply_mask_BT, row_N, position_N, slot_N))
    )


class LogProbs:
    """Log-probabilities of a causal LM at a temperature.

    The decoder gives hidden states, and the head is applied to the scored positions only, chunk by
    chunk. Whether that equals the model's own logits (some models scale or cap them) is measured
    once; where it does not, the model's own forward is used.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self._split = self._head_is_plain()

    def __call__(self, rows: Rows) -> Tensor:
        """[B, T], 0 where padded; with gradient where gradients are on."""
        target_N = rows.ids_BL[rows.row_N, rows.position_N]
        if self._split:
            hidden_BLD = self.model.base_model(
                input_ids=rows.ids_BL, attention_mask=rows.attention_BL, use_cache=False
            ).last_hidden_state
            logprob_N = self._from_hidden(hidden_BLD[rows.row_N, rows.position_N - 1], target_N)
        else:
            logits_BLV = self.model(
                input_ids=rows.ids_BL, attention_mask=rows.attention_BL, use_cache=False
            ).logits
            logprob_N = self._from_logits(logits_BLV[rows.row_N, rows.position_N - 1], target_N)
        return logprob_N.new_zeros(rows.reply_mask_BT.shape).index_put(
            (rows.row_N, rows.slot_N), logprob_N
        )

    def _from_logits(self, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        logits_NV = logits_NV.float() / self.temperature
        chosen_N = logits_NV.gather(1, target_N.unsqueeze(1)).squeeze(1)
        return chosen_N - logits_NV.logsumexp(1)

    def _from_hidden(self, hidden_ND: Tensor, target_N: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()

        def chunk(hidden_nD: Tensor, target_n: Tensor) -> Tensor:
            return self._from_logits(head(hidden_nD), target_n)

        size = max(1, CHUNK_ELEMENTS[hidden_ND.device.type] // head.weight.shape[0])
        if len(hidden_ND) <= size:
            return chunk(hidden_ND, target_N)
        pieces = zip(hidden_ND.split(size), target_N.split(size), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(chunk, h, t, use_reentrant=False) for h, t in pieces])
        return torch.cat([chunk(h, t) for h, t in pieces])

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        head = self.model.get_output_embeddings()
        if head is None or not hasattr(head, "weight") or self.model.base_model is self.model:
            return False
        ids = torch.arange(8, device=head.weight.device).unsqueeze(0) % head.weight.shape[0]
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        own = self.model(input_ids=ids, use_cache=False).logits
        mine = head(hidden)
        return own.shape == mine.shape and torch.allclose(
            own.float(), mine.float(), atol=1e-4, rtol=1e-4
        )
