"""Sequences laid end to end in one row, so that no layer works on padding, and a prompt that several of
them begin with is gone through once.

All layers but attention work token by token, and do not know where a sequence ends. Attention gets the
borders from here, and for every sequence the keys and values of its prompt: on a GPU in bfloat16 by a
kernel made for it (FlashAttention through torch, grouped heads not repeated, windows included),
elsewhere sequence by sequence, those of one length together.

Axis suffixes: N tokens of the row, F tokens of all sequences, prompts repeated, H query heads, K key
heads, D head size, S sequences of one length, L their tokens.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hacrl.policy.attention import Rule, Switch, causal, doing
from hacrl.policy.fuse import LearningFusion
from hacrl.policy.head import has_triton

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


@dataclass(frozen=True)
class Layout:
    """Where sequences lie in one row of tokens. One that shares its prompt lies in two pieces: the
    prompt, once, before the first sequence that has it, and the rest.

    Example: lay([(5, 6, 7), (5, 6, 8, 9), (4, 3)], [2, 2, 1]) has the row 5 6 7 8 9 4 3, and
    at_F = 0 1 2  0 1 3 4  5 6
    """

    lengths: tuple[int, ...]
    """Of the whole sequences."""
    prompts: tuple[int, ...]
    """Tokens of the prompt that a sequence shares; 0 where it shares none."""
    prompt_at: tuple[int, ...]
    rest_at: tuple[int, ...]
    """What follows the shared prompt, or the whole sequence."""
    tokens: int
    """Of the row."""
    at_F: Tensor
    """Place in the row of every token of every sequence; on the host."""

    def tokens_of(self, rows: Iterable[int]) -> int:
        """Of a row with these sequences alone."""
        prompts: dict[int, int] = {}
        rests = 0
        for b in rows:
            prompts[self.prompt_at[b]] = self.prompts[b]
            rests += self.lengths[b] - self.prompts[b]
        return rests + sum(prompts.values())

    @property
    def shares(self) -> bool:
        return any(self.prompts)


def lay(sequences: Sequence[Sequence[int]], prompts: Sequence[int] | None = None) -> Layout:
    """End to end; with the lengths of their prompts, equal prompts once."""
    begins = [
        tuple(row[:n]) for row, n in zip(sequences, prompts or [0] * len(sequences), strict=True)
    ]
    having = Counter(begins)
    lengths, shared, prompt_at, rest_at = [], [], [], []
    at: list[Tensor] = []
    found: dict[tuple[int, ...], int] = {}
    end = 0
    for row, begin in zip(sequences, begins, strict=True):
        prompt = len(begin) if having[begin] > 1 else 0
        if prompt and begin not in found:
            found[begin] = end
            end += prompt
        start = found[begin] if prompt else end
        rest = len(row) - prompt
        at += [torch.arange(start, start + prompt), torch.arange(end, end + rest)]
        lengths.append(len(row))
        shared.append(prompt)
        prompt_at.append(start)
        rest_at.append(end)
        end += rest
    return Layout(
        tuple(lengths), tuple(shared), tuple(prompt_at), tuple(rest_at), end, torch.cat(at)
    )


class Packed:
    """Attention over sequences that lie so (a `Work` of attention.py).

    Example: Packed(lay([(5, 6, 7), (8, 9)]), torch.device("cpu")) attends over tokens 0-2 and 3-4
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.longest = max(layout.lengths)

    def attend(
        self, layer: int, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, rule: Rule
    ) -> Tensor:
        if kernel_serves(query_1HND, value_1KND, rule):
            return self._kernel(query_1HND, key_1KND, value_1KND, rule)
        return self._one_by_one(query_1HND, key_1KND, value_1KND, rule)

    # ------------------------------------------------------------ by the kernel

    @cached_property
    def pieces(self) -> tuple[Tensor, Tensor, Copies | None]:
        """Borders of the pieces in the row, and of the keys that each sees, of which the last are its
        own; those keys, if any lie elsewhere."""
        layout = self.layout
        queries, keys, seen = [], [], []
        seen_by = layout.at_F.split(layout.lengths)
        for b, (length, prompt) in enumerate(zip(layout.lengths, layout.prompts, strict=True)):
            if prompt and layout.prompt_at[b] + prompt == layout.rest_at[b]:  # the first with it
                queries.append(prompt)
                keys.append(prompt)
                seen.append(seen_by[b][:prompt])
            queries.append(length - prompt)
            keys.append(length)
            seen.append(seen_by[b])
        copies = None
        if layout.shares:
            copies = Copies(placed(torch.cat(seen), self.device), of=layout.tokens)
        return _borders(queries, self.device), _borders(keys, self.device), copies

    def _kernel(self, query_1HND: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query_1HND, key, value))
        queries, keys, copies = self.pieces
        if copies:
            key, value = (copies.taken_from(t) for t in (key, value))
        # The kernel counts the tokens before the present one, a model's window the present one too.
        left = -1 if rule.window is None or rule.window >= self.longest else rule.window - 1
        out_NHD: Tensor = varlen_attn(
            query,
            key,
            value,
            queries,
            keys,
            self.longest,
            self.longest,
            scale=rule.scale,
            window_size=(left, 0),
            **_grouped(query, key),
        )
        return out_NHD.unsqueeze(0)

    # ------------------------------------------------------------ one by one

    @cached_property
    def by_length(self) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
        """(length, how many sequences have it); the tokens of all sequences in that order, and where
        among those each token of the row is, unless they lie so already."""
        lengths = self.layout.lengths
        order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
        runs = [(n, len(list(same))) for n, same in groupby(lengths[b] for b in order)]
        parts = self.layout.at_F.split(lengths)
        token_F = torch.cat([parts[b] for b in order])
        if len(token_F) == self.layout.tokens and bool((token_F.diff() == 1).all()):
            return runs, None, None
        # Of a prompt's copies the first: an assignment would take any, a run another than the next.
        place_N = torch.zeros(self.layout.tokens, dtype=torch.long).scatter_reduce(
            0, token_F, torch.arange(len(token_F)), "amin", include_self=False
        )
        return runs, placed(token_F, self.device), placed(place_N, self.device)

    def _one_by_one(self, query_1HND: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        runs, token_F, place_N = self.by_length
        given = [t.squeeze(0) for t in (query_1HND, key, value)]
        if token_F is not None:
            given = [t.index_select(1, token_F) for t in given]
        parts, start = [], 0
        for length, count in runs:
            query_SHLD, key_SKLD, value_SKLD = (
                t[:, start : start + length * count].unflatten(1, (count, length)).transpose(0, 1)
                for t in given
            )
            parts.append(causal(query_SHLD, key_SKLD, value_SKLD, rule).flatten(0, 1))
            start += length * count
        out_FHD = torch.cat(parts)
        return (out_FHD if place_N is None else out_FHD.index_select(0, place_N)).unsqueeze(0)


def _borders(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return placed(ends, device)


class Copies:
    """Rows of a tensor, some of them several times. Their gradients are added up in float32, and always
    in the same order: on a CPU by index_add, which is slow on a GPU and has no order there (it is taken
    all the same where there is no Triton).

    Example: Copies(torch.tensor([0, 1, 0]), of=2).taken_from(values) is values[[0, 1, 0]]
    """

    def __init__(self, row_F: Tensor, of: int) -> None:
        self.row_F = row_F
        self.rows = of

    def taken_from(self, values: Tensor) -> Tensor:
        found: Tensor = _Taken.apply(values, self)
        return found

    def added(self, gradient: Tensor) -> Tensor:
        if gradient.is_cuda and has_triton():
            from hacrl.policy.packing_kernels import sum_of_copies

            total = sum_of_copies(gradient.flatten(1).contiguous(), *self.by_row)
            return total.view(self.rows, *gradient.shape[1:])
        total = gradient.new_zeros((self.rows, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, self.row_F, gradient.float()).to(gradient.dtype)

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """The copies row by row, and where each row's begin among them."""
        sorted_F, copy_F = self.row_F.sort(stable=True)
        rows = torch.arange(self.rows + 1, device=self.row_F.device)
        return torch.searchsorted(sorted_F, rows), copy_F


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return values.index_select(0, copies.row_F)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.added(gradient), None


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
