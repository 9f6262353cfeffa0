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
        self.model, self.end_ids = model, tuple(end_ids)
        self._settings = pad_id, rows, cache_fraction
        self._chosen: PagedSampler | TransformersSampler | None = None

    def weights_changed(self) -> None:
        """Nothing to do: the sampler reads the trainer's tensors."""

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        if not requests:
            return []
        if self._chosen is None:
            shape = None if self.model.device.type == "cpu" else find_cache_shape(self.model)
            if shape is None:
                self._chosen = TransformersSampler(self.model, self.end_ids, *self._settings)
            else:
                self._chosen = PagedSampler(self.model, shape, self.end_ids, *self._settings)
        return self._chosen.sample(requests, temperature)

    @property
    def cache_kind(self) -> str:
        """KV cache in use: "paged" or "transformers"; "unknown" before the first request."""
        kinds = {PagedSampler: "paged", TransformersSampler: "transformers"}
        return kinds.get(type(self._chosen), "unknown")


def builtin_sampler(policy: Policy, settings: SamplerConfig) -> BuiltinSampler:
    """The built-in sampler of a policy."""
    return BuiltinSampler(
        policy.model,
        policy.renderer.end_ids,
        policy.renderer.pad_id,
        policy.agent.sampler_rows,
        cache_fraction=settings.cache_fraction,
    )
