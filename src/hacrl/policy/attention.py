"""One attention function, registered in transformers, for packed rows and for the built-in KV cache.

A decoder computes queries, keys and values and passes them to an attention function chosen by name.
While a `Switch` is on, that function is `cached_attention`: it passes them to the active `Work` (packed
sequences, a prompt's prefill, or one decode step of many rows), which stores keys and values and
attends. transformers' caches, masks and repeated heads are not used, so every decoder that goes through
the interface is supported: all sizes, families and adapters.

Axis suffixes: B rows, H query heads, K key heads, L tokens, D head size.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

NAME = "hacrl_cached"


@dataclass(frozen=True)
class Rule:
    """How a layer attends.

    Example: Rule(scale=0.125, window=512, cap=None)
    """

    scale: float
    window: int | None  # number of tokens that a token sees, itself included; None: all before it
    cap: float | None  # soft cap: scores become cap * tanh(score / cap)


class Work(Protocol):
    """One use of the model: how its layers store keys and values, and attend."""

    def attend(
        self, layer: int, query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, rule: Rule
    ) -> Tensor:
        """Store keys and values, attend; [B, L, H, D]."""


_work: Work | None = None


def cached_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for every layer. Raises TypeError for what a `Work` does not
    compute; the checks that catch it use the model's own attention."""
    if attention_mask is not None or s_aux is not None:
        raise TypeError("the layer has a mask of its own, or attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is None and _has_window(module):
        raise TypeError("the layer has a sliding window that only the mask contains")
    assert _work is not None, "no work is active: use `doing`"
    rule = Rule(scale, sliding_window, softcap)
    return _work.attend(module.layer_idx, query, key, value, rule), None


def _has_window(module: Any) -> bool:
    """Whether the config gives the layer a window (or chunks, as in Llama 4)."""
    config = getattr(module, "config", None)
    if kinds := getattr(config, "layer_types", None):
        return kinds[module.layer_idx] in ("sliding_attention", "chunked_attention")
    return bool(getattr(config, "sliding_window", None))


AttentionInterface.register(NAME, cached_attention)


class Switch:
    """Switches a model's attention function inside a block."""

    def __init__(self, model: Any) -> None:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._configs = [c for c in configs.values() if hasattr(c, "_attn_implementation")]

    @contextlib.contextmanager
    def on(self, name: str = NAME) -> Iterator[None]:
        before = [c._attn_implementation for c in self._configs]
        for config in self._configs:
            config._attn_implementation = name
        try:
            yield
        finally:
            for config, own in zip(self._configs, before, strict=True):
                config._attn_implementation = own


@contextlib.contextmanager
def doing(work: Work) -> Iterator[None]:
    """`work` is active inside the block."""
    global _work
    before, _work = _work, work
    try:
        yield
    finally:
        _work = before


def causal(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, rule: Rule) -> Tensor:
    """Causal attention; rows padded on the right need no mask. With more keys than queries, the queries
    are the last tokens."""
    length, queries = key_BKLD.shape[2], query_BHLD.shape[2]
    windowed = rule.window is not None and length > rule.window
    if rule.cap is None and not windowed and queries == length:
        grouped = query_BHLD.shape[1] != key_BKLD.shape[1]
        out_BHLD = sdpa(
            query_BHLD, key_BKLD, value_BKLD, is_causal=True, scale=rule.scale, enable_gqa=grouped
        )
        return out_BHLD.transpose(1, 2)
    at_L = torch.arange(length, device=query_BHLD.device)
    distance_LL = at_L[-queries:].unsqueeze(1) - at_L
    seen_LL = (distance_LL >= 0) & (distance_LL < (rule.window or length))
    groups = query_BHLD.shape[1] // key_BKLD.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key_BKLD, value_BKLD))
    return masked(query_BHLD, key, value, seen_LL, rule).transpose(1, 2)


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, rule: Rule) -> Tensor:
    """Attention with the mask `seen`; query and key heads are equal in number."""
    if rule.cap is None:
        return sdpa(query, key, value, attn_mask=seen, scale=rule.scale)
    scores = query.float() @ key.float().transpose(-1, -2) * rule.scale
    scores = rule.cap * torch.tanh(scores / rule.cap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


@dataclass(frozen=True)
class CacheShape:
    """Shape of a model's KV cache per token.

    Example: CacheShape(layers=28, heads=8, size=128, dtype=torch.bfloat16).token_bytes == 114_688
    """

    layers: int
    heads: int
    size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.size * 2 * self.dtype.itemsize


class ShapeFinder:
    """A work that records what the layers pass, and keeps keys and values for the following tokens."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, torch.dtype]] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.plain = True  # whether keys and values have the same size, as the cache needs

    def attend(
        self, layer: int, query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, rule: Rule
    ) -> Tensor:
        self.plain &= key_BKLD.shape == value_BKLD.shape
        self.seen[layer] = (key_BKLD.shape[1], key_BKLD.shape[3], key_BKLD.dtype)
        if layer in self._stored:
            keys, values = self._stored[layer]
            key_BKLD = torch.cat([keys, key_BKLD], 2)
            value_BKLD = torch.cat([values, value_BKLD], 2)
        self._stored[layer] = key_BKLD, value_BKLD
        return causal(query_BHLD, key_BKLD, value_BKLD, rule)

    def shape(self) -> CacheShape | None:
        """None if layers differ, or are not numbered from 0."""
        numbered = sorted(self.seen) == list(range(len(self.seen)))
        if not self.plain or not numbered or len(set(self.seen.values())) != 1:
            return None
        return CacheShape(len(self.seen), *self.seen[0])
