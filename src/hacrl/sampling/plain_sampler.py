"""Sampling with the library's own growing cache, for models whose attention is not exchangeable.

Axis suffixes: R distinct prompts, B rows being written, L tokens, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hacrl.sampling.decode import draw

if TYPE_CHECKING:
    from hacrl.sampling.sampler import Request

Written = tuple[tuple[int, ...], tuple[float, ...], bool]
"""Token ids, their log-probabilities, whether an end token came."""

COMPACT_SHARE = 0.25
"""Finished rows are dropped from the batch once so many of its rows are done."""


class PlainSampler:
    """Writes replies side by side, at most `rows` at a time; the batch shrinks as rows finish."""

    def __init__(self, model: Any, end_ids: Sequence[int], pad_id: int, rows: int) -> None:
        self.model = model
        self.end_ids = tuple(end_ids)
        self.pad_id = pad_id
        self.rows = rows

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Written]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        replies: list[Written] = []
        for first in range(0, len(requests), self.rows):
            replies += self._sample_rows(requests[first : first + self.rows], temperature)
        return replies

    def _sample_rows(self, requests: Sequence[Request], temperature: float) -> list[Written]:
        device = self.model.device
        cache, logits_BV, mask_BL = self._prefill([r.prompt_ids for r in requests])
        alive = torch.arange(len(requests), device=device)  # which request each row writes
        keys_B = torch.tensor([r.key for r in requests], device=device)
        limits_B = torch.tensor([r.limit for r in requests], device=device)
        end_ids = torch.tensor(self.end_ids, device=device)
        longest = max(r.limit for r in requests)
        ids = torch.full((len(requests), longest), self.pad_id, device=device)
        logprobs = torch.zeros((len(requests), longest), device=device)
        lengths = torch.zeros(len(requests), dtype=torch.long, device=device)
        stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        done_B = limits_B < 1
        for position in range(longest):
            token_B, logprob_B = draw(
                logits_BV, keys_B, torch.full_like(keys_B, position), temperature
            )
            writing = alive[~done_B]
            ids[writing, position] = token_B[~done_B]
            logprobs[writing, position] = logprob_B[~done_B]
            lengths[writing] = position + 1
            ended_B = torch.isin(token_B, end_ids)
            stopped[writing] = ended_B[~done_B]
            done_B = done_B | ended_B | (limits_B <= position + 1)
            finished = int(done_B.sum())
            if finished == len(done_B):
                break
            if finished >= COMPACT_SHARE * len(done_B):
                keep = (~done_B).nonzero().squeeze(1)
                cache.reorder_cache(keep)
                alive, keys_B, limits_B = alive[keep], keys_B[keep], limits_B[keep]
                token_B, mask_BL, done_B = token_B[keep], mask_BL[keep], done_B[keep]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(mask_BL), 1)], dim=1)
            logits_BV = self._forward(token_B.unsqueeze(1), mask_BL, cache)
        return [
            (tuple(row_ids[:n]), tuple(row_logprobs[:n]), stop)
            for row_ids, row_logprobs, n, stop in zip(
                ids.tolist(), logprobs.tolist(), lengths.tolist(), stopped.tolist(), strict=True
            )
        ]

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[DynamicCache, Tensor, Tensor]:
        """Each distinct prompt once, padded left, then spread to the rows that continue it."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, distinct))
        ids_RL = torch.tensor([[self.pad_id] * (width - len(p)) + list(p) for p in distinct])
        mask_RL = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct])
        cache = DynamicCache(config=self.model.config)
        mask_RL = mask_RL.to(self.model.device)
        logits_RV = self._forward(ids_RL.to(self.model.device), mask_RL, cache)
        spread = torch.tensor([distinct[p] for p in prompts], device=self.model.device)
        cache.reorder_cache(spread)
        return cache, logits_RV[spread], mask_RL[spread]

    def _forward(self, ids: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the last position; positions count real tokens only."""
        positions = (mask_BL.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=mask_BL,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()
