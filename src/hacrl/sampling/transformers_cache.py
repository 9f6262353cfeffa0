"""Sampling with transformers' KV cache: on a CPU, and for models that the paged KV cache does not fit.

Axis suffixes: P distinct prompts, B rows, L tokens, V words.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hacrl.noise import exponential_noise
from hacrl.policy.attention import Switch
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.cache import PREFILL_TOKENS, device_memory
from hacrl.stopping import check

COMPACT_FRACTION = 0.25
"""Finished rows are dropped from the batch when they make up this fraction of it."""


class TransformersSampler:
    """Samples batches of at most `rows` replies; a batch shrinks as its rows finish.

    If keys and values of all rows would need more than `cache_fraction` of the device's memory, batches
    are smaller.
    """

    def __init__(
        self,
        model: Any,
        end_ids: Sequence[int],
        pad_id: int,
        rows: int,
        cache_fraction: float = 1.0,
    ) -> None:
        self.model = model
        self.end_ids, self.pad_id, self.rows = tuple(end_ids), pad_id, rows
        self.cache_fraction = cache_fraction

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        replies: list[Reply] = []
        # transformers' sdpa omits the cap on attention scores (Gemma 2), which the trainer applies.
        capped = getattr(self.model.config.get_text_config(), "attn_logit_softcapping", None)
        with Switch(self.model).on("eager") if capped else nullcontext():
            for batch in self._batches(requests):
                replies += self._sample_batch(batch, temperature)
        return replies

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Consecutive requests: as many as fit the cache and whose prompts fit one prefill pass."""
        longest = max((len(r.prompt_ids) + r.limit for r in requests), default=1)
        memory = int(self.cache_fraction * device_memory(self.model.device))
        rows = min(self.rows, max(1, memory // (longest * token_bytes(self.model))))
        batch: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        width = 0
        for request in requests:
            width = max(width, len(request.prompt_ids))
            prompts.add(request.prompt_ids)
            if batch and (len(batch) == rows or len(prompts) * width > PREFILL_TOKENS):
                yield batch
                batch, prompts, width = [], {request.prompt_ids}, len(request.prompt_ids)
            batch.append(request)
        if batch:
            yield batch

    def _sample_batch(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        device = self.model.device
        cache, logits_BV, mask_BL = self._prefill([r.prompt_ids for r in requests])
        request_B = torch.arange(len(requests), device=device)
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
            check()
            token_B, logprob_B = draw(
                logits_BV, keys_B, torch.full_like(keys_B, position), temperature
            )
            active = request_B[~done_B]
            ids[active, position] = token_B[~done_B]
            logprobs[active, position] = logprob_B[~done_B]
            lengths[active] = position + 1
            ended_B = torch.isin(token_B, end_ids)
            stopped[active] = ended_B[~done_B]
            done_B = done_B | ended_B | (limits_B <= position + 1)
            finished = int(done_B.sum())
            if finished == len(done_B):
                break
            if finished >= COMPACT_FRACTION * len(done_B):
                keep = (~done_B).nonzero().squeeze(1)
                cache.reorder_cache(keep)
                request_B, keys_B, limits_B = request_B[keep], keys_B[keep], limits_B[keep]
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
        """Prefill each distinct prompt once, left-padded, and copy its cache to its rows."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, distinct))
        ids_PL = torch.tensor([[self.pad_id] * (width - len(p)) + list(p) for p in distinct])
        mask_PL = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct])
        cache = DynamicCache(config=self.model.config)
        mask_PL = mask_PL.to(self.model.device)
        logits_PV = self._forward(ids_PL.to(self.model.device), mask_PL, cache)
        prompt_B = torch.tensor([distinct[p] for p in prompts], device=self.model.device)
        cache.reorder_cache(prompt_B)
        return cache, logits_PV[prompt_B], mask_PL[prompt_B]

    def _forward(self, ids: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the last position. Padding does not count in position ids."""
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


@torch.no_grad()
def token_bytes(model: Any) -> int:
    """Bytes of one token's keys and values, from the cache of one token: layers may differ in sizes, and
    some keep none."""
    cache = DynamicCache(config=model.config)
    ids_11 = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=ids_11, past_key_values=cache, use_cache=True, logits_to_keep=1)
    kept = (getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values"))
    return max(1, sum(t.nbytes for t in kept if t is not None))


@torch.inference_mode()
def draw(
    logits_RV: Tensor, key_R: Tensor, index_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; returns tokens and their log-probabilities at the temperature.

    The chosen word minimises exponential noise / probability, which is the Gumbel-max draw without
    logarithms. Temperature 0 is greedy.
    """
    logits_RV = logits_RV.float()
    if temperature not in (0, 1):
        logits_RV = logits_RV / temperature
    probs_RV = logits_RV.softmax(1)
    race_RV = logits_RV
    if temperature:
        noise_RV = exponential_noise(key_R, index_R, logits_RV.shape[1])
        race_RV = torch.div(probs_RV, noise_RV, out=noise_RV)
    # On a CPU numpy's argmax takes a seventh of the time of torch's.
    on_cpu = race_RV.device.type == "cpu"
    token_R = torch.from_numpy(race_RV.numpy().argmax(1)) if on_cpu else race_RV.argmax(1)
    return token_R, probs_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).log()
