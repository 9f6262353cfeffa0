"""The built-in sampler: samples from the trainer's own weights, with counter-based noise (noise.py).

It chooses how keys and values are stored: on a GPU the paged engine (paged.py), and for models that its
KV cache does not fit transformers' cache (transformers_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hacrl.config import SamplerConfig
from hacrl.policy.attention import CacheShape, Switch
from hacrl.sampling import cache as cache_module
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.compatibility import find_cache_shape
from hacrl.sampling.decode import has_static_rope
from hacrl.sampling.lean import LeanForward, fits, reproduces_logits
from hacrl.sampling.paged import ContinuousBatch, PagedSampler
from hacrl.sampling.slots import HostDecoder, LibraryForward, Passes, SlotCache
from hacrl.sampling.transformers_cache import TransformersSampler

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy


class BuiltinSampler:
    """Samples at most `rows` replies at a time. A reply depends only on weights, prompt and key, not on
    the other requests.

    Example: BuiltinSampler(model, end_ids=[2], pad_id=0, rows=512).sample(requests, temperature=1.0)
    """

    def __init__(
        self,
        model: Any,
        end_ids: Sequence[int],
        pad_id: int,
        rows: int,
        *,
        cache_fraction: float = 0.2,
    ) -> None:
        self.model = model
        self.end_ids, self.pad_id, self.rows = tuple(end_ids), pad_id, rows
        self.cache_fraction = cache_fraction
        self.cache_kind = "unknown"
        """How keys and values are stored: "paged", "slots" or "transformers"; "unknown" before the first
        request."""
        self._shape: CacheShape | None = None
        self._lean = False
        self._paged: PagedSampler | None = None

    def weights_changed(self) -> None:
        """Nothing to do: the sampler reads the trainer's tensors."""

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        if not requests:
            return []
        if self.cache_kind == "unknown":
            self._choose_cache()
        if self._paged is not None:
            return self._paged.sample(requests, temperature)
        if self._shape is not None:
            return self._sample_in_slots(self._shape, requests, temperature)
        sampler = TransformersSampler(self.model, self.end_ids, self.pad_id, self.rows)
        return sampler.sample(requests, temperature)

    def _choose_cache(self) -> None:
        self._shape = find_cache_shape(self.model)
        self.cache_kind = "transformers"
        if self._shape is None:
            return
        if self.model.device.type == "cpu":
            self.cache_kind = "slots"
            self._lean = reproduces_logits(self.model, self._shape)
            return
        self.cache_kind = "paged"
        self._paged = PagedSampler(
            self.model, self._shape, self.end_ids, self.pad_id, self.rows, self.cache_fraction
        )

    def _sample_in_slots(
        self, shape: CacheShape, requests: Sequence[Request], temperature: float
    ) -> list[Reply]:
        longest = max(len(r.prompt_ids) + r.limit for r in requests)
        memory = int(self.cache_fraction * cache_module.device_memory(self.model.device))
        fit = max(memory // (longest * shape.token_bytes), 1)
        rows = min(self.rows, len(requests), fit)
        slots = SlotCache(shape, rows, longest)
        passes: Passes = LibraryForward(self.model)
        if self._lean and fits(self.model):
            passes = LeanForward(self.model, longest if has_static_rope(self.model) else None)
        decoder = HostDecoder(passes, slots, temperature)
        with Switch(self.model).on():
            batch = ContinuousBatch(
                requests, slots, decoder, rows, end_ids=self.end_ids, pad_id=self.pad_id
            )
            return batch.run()


def builtin_sampler(policy: Policy, settings: SamplerConfig) -> BuiltinSampler:
    """The built-in sampler of a policy."""
    return BuiltinSampler(
        policy.model,
        policy.renderer.end_ids,
        policy.renderer.pad_id,
        policy.agent.sampler_rows,
        cache_fraction=settings.cache_fraction,
    )
