"""The built-in sampler: the trainer's own weights, a key-value cache, counter-based noise.

Axis suffixes: R distinct prompts, B rows being written, L tokens, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hacrl.noise import gumbel_noise

COMPACT_SHARE = 0.25
"""Finished rows are dropped from the batch once so many of its rows are done."""


@dataclass(frozen=True)
class Request:
    """One reply to write.

    Example: Request(prompt_ids=(1, 9), key=stream_key(seed, "wren", 3, "add-17-25", 0), limit=32)
    """

    prompt_ids: tuple[int, ...]
    key: int
    """Names the noise stream; the reply is a function of weights, prompt and key."""
    limit: int
    """Most new tokens."""


@dataclass(frozen=True)
class Reply:
    """What was written, the end token included if it came.

    Example: Reply(token_ids=(7, 5, 2), logprobs=(-0.1, -0.3, -0.01), stopped=True)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class Sampler:
    """Writes replies side by side, at most `rows` at a time, from the weights the trainer updates."""

    def __init__(self, model: Any, end_ids: Sequence[int], pad_id: int, rows: int) -> None:
        self.model = model
        self.end_ids = tuple(end_ids)
        self.pad_id = pad_id
        self.rows = rows

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        replies: list[Reply] = []
        for first in range(0, len(requests), self.rows):
            replies += self._sample_rows(requests[first : first + self.rows], temperature)
        return replies

    def _sample_rows(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
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
        done_B = torch.zeros(len(requests), dtype=torch.bool, device=device)
        for position in range(longest):
            token_B, logprob_B = _draw(logits_BV, keys_B, position, temperature)
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
                cache.batch_select_indices(keep)
                alive, keys_B, limits_B = alive[keep], keys_B[keep], limits_B[keep]
                token_B, mask_BL, done_B = token_B[keep], mask_BL[keep], done_B[keep]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(mask_BL), 1)], dim=1)
            logits_BV = self._forward(token_B.unsqueeze(1), mask_BL, cache)
        return [
            Reply(tuple(row_ids[:n]), tuple(row_logprobs[:n]), stop)
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
        cache.batch_select_indices(spread)
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


def _draw(
    logits_BV: Tensor, keys_B: Tensor, position: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """One token a row by Gumbel-max, and its log-probability at the temperature."""
    logprobs_BV = (logits_BV / (temperature or 1.0)).log_softmax(1)
    if temperature:
        noise_BV = gumbel_noise(keys_B, torch.full_like(keys_B, position), logits_BV.shape[1])
        token_B = (logprobs_BV + noise_BV).argmax(1)
    else:
        token_B = logits_BV.argmax(1)
    return token_B, logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
