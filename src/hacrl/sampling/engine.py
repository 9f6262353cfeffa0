"""The built-in sampler: samples from the trainer's own weights, with counter-based noise (noise.py).

On a GPU it uses the paged engine (paged.py). On a CPU, and for models that the paged KV cache does not
fit, it uses transformers' cache (transformers_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hacrl.config import SamplerConfig
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.cache import device_memory
from hacrl.sampling.compatibility import find_cache_shape
from hacrl.sampling.paged import PagedSampler
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
        """KV cache in use: "paged" or "transformers"; "unknown" before the first request."""
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
        cache_bytes = int(self.cache_fraction * device_memory(self.model.device))
        sampler = TransformersSampler(
            self.model, self.end_ids, self.pad_id, self.rows, cache_bytes=cache_bytes
        )
        return sampler.sample(requests, temperature)

    def _choose_cache(self) -> None:
        self.cache_kind = "transformers"
        if self.model.device.type == "cpu":
            return
        shape = find_cache_shape(self.model)
        if shape is not None:
            self.cache_kind = "paged"
            self._paged = PagedSampler(
                self.model, shape, self.end_ids, self.pad_id, self.rows, self.cache_fraction
            )


def builtin_sampler(policy: Policy, settings: SamplerConfig) -> BuiltinSampler:
    """The built-in sampler of a policy."""
    return BuiltinSampler(
        policy.model,
        policy.renderer.end_ids,
        policy.renderer.pad_id,
        policy.agent.sampler_rows,
        cache_fraction=settings.cache_fraction,
    )
