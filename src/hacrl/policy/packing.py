"""Sequences laid end to end in one row, so that no layer works on padding.

All layers but attention work token by token, and do not know where a sequence ends. Attention gets the
borders from here: on a GPU in bfloat16 from a kernel made for it (FlashAttention through torch, grouped
heads not repeated, windows included), elsewhere sequence by sequence, those of one length together.

Axis suffixes: N tokens of all sequences, H query heads, K key heads, D head size, S sequences of one
length, L their tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hacrl.policy.attention import Rule, Switch, causal, doing
from hacrl.policy.fuse import LearningFusion

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch without it
    varlen_attn = None


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device. From pinned memory a copy to a GPU does not wait for the work before it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Packed:
    """Attention over sequences of these lengths (a `Work` of attention.py).

    Example: Packed([3, 2], torch.device("cpu")) attends over tokens 0-2 and 3-4 of a row of 5
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.longest = max(lengths)
        self.runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        """(length, how many in a row have it)."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.borders = placed(ends, device)

    def attend(
        self, layer: int, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, rule: Rule
    ) -> Tensor:
        if kernel_serves(query_1HND, value_1KND, rule):
            return self._kernel(query_1HND, key_1KND, value_1KND, rule)
        return self._one_by_one(query_1HND, key_1KND, value_1KND, rule)

    def _kernel(self, query_1HND: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        query, key, value = (t[0].transpose(0, 1) for t in (query_1HND, key, value))
        # The kernel counts the tokens before the present one, a model's window the present one too.
        left = -1 if rule.window is None or rule.window >= self.longest else rule.window - 1
        out_NHD: Tensor = varlen_attn(
            query,
            key,
            value,
            self.borders,
            self.borders,
            self.longest,
            self.longest,
            scale=rule.scale,
            window_size=(left, 0),
            **_grouped(query, key),
        )
        return out_NHD.unsqueeze(0)

    def _one_by_one(self, query_1HND: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        parts, start = [], 0
        for length, count in self.runs:
            query_SHLD, key_SKLD, value_SKLD = (
                t[0, :, start : start + length * count]
                .unflatten(1, (count, length))
                .transpose(0, 1)
                for t in (query_1HND, key, value)
            )
            parts.append(causal(query_SHLD, key_SKLD, value_SKLD, rule).flatten(0, 1))
            start += length * count
        return torch.cat(parts).unsqueeze(0)


_now: tuple[Switch, Packed, LearningFusion | None] | None = None


@contextlib.contextmanager
def attending(
    switch: Switch, packed: Packed, fusion: LearningFusion | None = None
) -> Iterator[None]:
    """The model's attention is over `packed` inside the block, and its small parts are fused."""
    global _now
    before, _now = _now, (switch, packed, fusion)
    try:
        with switch.on(), doing(packed), fusion.on() if fusion else nullcontext():
            yield
    finally:
        _now = before


def attending_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For gradient checkpointing (its `context_fn`): a layer that the backward computes again, when
    the block is long over, works as it did the first time."""
    return nullcontext(), attending(*_now) if _now else nullcontext()


def kernel_serves(query: Tensor, value: Tensor, rule: Rule) -> bool:
    """Whether the kernel can do it: half precision on a GPU, heads of its sizes, no score cap."""
    size = query.shape[-1]
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and rule.cap is None
    )


def _grouped(query: Tensor, key: Tensor) -> dict[str, bool]:
    """torch 2.11 takes grouped heads as they are; later versions want to be told."""
    if query.shape[1] == key.shape[1] or "enable_gqa" not in _ARGUMENTS:
        return {}
    return {"enable_gqa": True}


_ARGUMENTS = varlen_attn.__kwdefaults__ if varlen_attn is not None else {}
