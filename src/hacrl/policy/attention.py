"""The model's own forward over a cache that is ours: one attention function, registered in transformers.

A decoder computes queries, keys and values and hands them to an attention function chosen by name.
While the sampler works, that function is `cached_attention`: it passes them to the *work* at hand
(a prompt's prefill, or one decode step of many rows), which stores keys and values and attends. The
library's caches, masks and repeats of grouped heads are not involved, so every decoder that goes
through the interface is served alike: sizes, families, adapters.

Axis suffixes: B rows, H query heads, K key heads, L tokens, D head size.
"""

from __future__ import annotations

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
    window: int | None
    """A token sees so many tokens, itself included; None: all before it."""
    cap: float | None
    """Scores are squashed to cap * tanh(score / cap)."""


class Work(Protocol):
    """What the sampler is doing with the model."""

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
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers calls this for every layer."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = rule_of(module, scale, sliding_window, softcap)
    return attend(module.layer_idx, query, key, value, rule), None


def rule_of(module: Any, scale: float, window: int | None, cap: float | None = None) -> Rule:
    if window is None and _has_window(module):
        raise TypeError("a window that only the mask knows")
    return Rule(scale, window, cap)


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """By the work at hand."""
    assert _work is not None, "only the sampler uses this attention"
    return _work.attend(layer, query, key, value, rule)


def _has_window(module: Any) -> bool:
    """Whether the config gives the layer a window (or chunks, as in Llama 4), whoever applies it."""
    config = getattr(module, "config", None)
    if kinds := getattr(config, "layer_types", None):
        return kinds[module.layer_idx] in ("sliding_attention", "chunked_attention")
    return bool(getattr(config, "sliding_window", None))


AttentionInterface.register(NAME, cached_attention)


class Switch:
    """Turns a model's attention to ours, or another, for as long as a block lasts."""

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
    """Attention belongs to `work` inside the block."""
    global _work
    before, _work = _work, work
    try:
        yield
    finally:
        _work = before


def causal(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, rule: Rule) -> Tensor:
    """Every token over itself and those before it; rows padded on the right need no mask. Where there
    are more keys than queries, the queries are the last tokens."""
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
    """Attention to what is `seen`; as many query heads as key heads."""
    if rule.cap is None:
        return sdpa(query, key, value, attn_mask=seen, scale=rule.scale)
    scores = query.float() @ key.float().transpose(-1, -2) * rule.scale
    scores = rule.cap * torch.tanh(scores / rule.cap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


@dataclass(frozen=True)
class CacheShape:
    """What a model's cache must hold of a token.

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
    """A work that looks at what the layers hand over, and keeps it for the tokens that follow."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, torch.dtype]] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.plain = True
        """Keys and values of one size: what the cache can hold."""
        self.limits: dict[int, tuple[int | None, float | None]] = {}
        """Window and cap of each layer: few tokens do not show them in what they give."""

    def attend(
        self, layer: int, query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, rule: Rule
    ) -> Tensor:
        self.plain &= key_BKLD.shape == value_BKLD.shape
        self.limits[layer] = (rule.window, rule.cap)
        self.seen[layer] = (key_BKLD.shape[1], key_BKLD.shape[3], key_BKLD.dtype)
        if layer in self._stored:
            keys, values = self._stored[layer]
            key_BKLD = torch.cat([keys, key_BKLD], 2)
            value_BKLD = torch.cat([values, value_BKLD], 2)
        self._stored[layer] = key_BKLD, value_BKLD
        return causal(query_BHLD, key_BKLD, value_BKLD, rule)

    def shape(self) -> CacheShape | None:
        """None where layers differ, or do not count from 0."""
        if not self.plain or sorted(self.seen) != list(range(len(self.seen))) or not self.seen:
            return None
        if len(set(self.seen.values())) > 1:
            return None
        return CacheShape(len(self.seen), *self.seen[0])
