"""Sequences packed in one row of tokens: no padding, and a prompt that several share is computed once.

All layers but attention work token by token and ignore where a sequence ends. Attention gets the
boundaries from here, and for every sequence the keys and values of its prompt: on a GPU in half
precision from FlashAttention's variable-length kernel, elsewhere sequence by sequence, batched by
length.

Axis suffixes: N tokens of the row, F tokens of all sequences with shared prompts repeated, H query
heads, K key heads, D head size, S sequences of one length, L their tokens.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from hacrl.policy.attention import Rule, Switch, causal, doing
from hacrl.policy.fuse import LearningFusion


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. From pinned memory the copy does not wait for earlier work on a GPU."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# ---------------------------------------------------------------- layout


@dataclass(frozen=True)
class Layout:
    """Where sequences are in one row of tokens. A sequence with a shared prompt is in two pieces: the
    prompt, once, before the first sequence that has it, and the rest.

    Example: pack([(5, 6, 7), (5, 6, 8, 9), (4, 3)], [2, 2, 1]) has the row 5 6 7 8 9 4 3, and
    index_F = 0 1 2  0 1 3 4  5 6
    """

    lengths: tuple[int, ...]  # of the whole sequences
    prompts: tuple[int, ...]  # tokens of each sequence's shared prompt; 0 if it shares none
    tokens: int  # length of the row
    index_F: Tensor  # index in the row of every token of every sequence; on the host

    @property
    def shares(self) -> bool:
        return any(self.prompts)


def pack(sequences: Sequence[Sequence[int]], prompts: Sequence[int] | None = None) -> Layout:
    """Concatenate sequences. With the lengths of their prompts, equal prompts are put once."""
    begins = [
        tuple(row[:n]) for row, n in zip(sequences, prompts or [0] * len(sequences), strict=True)
    ]
    count = Counter(begins)
    shared: list[int] = []
    index: list[Tensor] = []
    start_of: dict[tuple[int, ...], int] = {}
    end = 0
    for row, begin in zip(sequences, begins, strict=True):
        prompt = len(begin) if count[begin] > 1 else 0
        if prompt and begin not in start_of:
            start_of[begin] = end
            end += prompt
        start = start_of[begin] if prompt else end
        rest = len(row) - prompt
        index += [torch.arange(start, start + prompt), torch.arange(end, end + rest)]
        shared.append(prompt)
        end += rest
    return Layout(tuple(map(len, sequences)), tuple(shared), end, torch.cat(index))


# ---------------------------------------------------------------- attention


class Packed:
    """Attention over the sequences of a layout (a `Work` of attention.py).

    Example: Packed(pack([(5, 6, 7), (8, 9)]), torch.device("cpu")) attends over tokens 0-2 and 3-4
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.longest = max(layout.lengths)

    def attend(
        self, layer: int, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, rule: Rule
    ) -> Tensor:
        if kernel_serves(query_1HND, value_1KND, rule):
            return self._kernel(query_1HND, key_1KND, value_1KND, rule)
        return self._by_length(query_1HND, key_1KND, value_1KND, rule)

    @cached_property
    def pieces(self) -> tuple[Tensor, Tensor, Copies | None]:
        """For the kernel: boundaries of the pieces in the row, boundaries of the keys that each piece
        sees (its own are the last), and these keys, unless they are the row itself."""
        layout = self.layout
        queries, seen = [], []
        starts: set[int] = set()  # of prompts in the row
        for at, prompt in zip(layout.index_F.split(layout.lengths), layout.prompts, strict=True):
            if prompt and int(at[0]) not in starts:  # a shared prompt is a piece of its own
                starts.add(int(at[0]))
                queries.append(prompt)
                seen.append(at[:prompt])
            queries.append(len(at) - prompt)
            seen.append(at)
        copies = None
        if layout.shares:
            copies = Copies(to_device(torch.cat(seen), self.device), of=layout.tokens)
        keys = [len(at) for at in seen]
        return _boundaries(queries, self.device), _boundaries(keys, self.device), copies

    def _kernel(self, query_1HND: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query_1HND, key, value))
        queries, keys, copies = self.pieces
        if copies:
            key, value = (copies.taken_from(t) for t in (key, value))
        # The kernel's window does not count the present token, a model's window does.
        left = -1 if rule.window is None or rule.window >= self.longest else rule.window - 1
        attention: Any = varlen_attn
        out_NHD: Tensor = attention(
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

    @cached_property
    def by_length(self) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
        """[(length, number of sequences)], the tokens of all sequences in that order, and the inverse:
        where each token of the row is among them. None, None if the row is in that order already."""
        lengths = self.layout.lengths
        order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
        runs = [(n, len(list(same))) for n, same in groupby(lengths[b] for b in order)]
        parts = self.layout.index_F.split(lengths)
        token_F = torch.cat([parts[b] for b in order])
        if len(token_F) == self.layout.tokens and bool((token_F.diff() == 1).all()):
            return runs, None, None
        # The first copy of a shared prompt. Plain assignment would take an arbitrary one.
        inverse_N = torch.zeros(self.layout.tokens, dtype=torch.long).scatter_reduce(
            0, token_F, torch.arange(len(token_F)), "amin", include_self=False
        )
        return runs, to_device(token_F, self.device), to_device(inverse_N, self.device)

    def _by_length(self, query_1HND: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        runs, token_F, inverse_N = self.by_length
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
        return (out_FHD if inverse_N is None else out_FHD.index_select(0, inverse_N)).unsqueeze(0)


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


def kernel_serves(query: Tensor, value: Tensor, rule: Rule) -> bool:
    """Whether the kernel supports it: half precision on a GPU, its head sizes, no score cap."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and rule.cap is None
    )


def _grouped(query: Tensor, key: Tensor) -> dict[str, bool]:
    """torch 2.11 accepts grouped heads as they are; later versions need enable_gqa."""
    grouped = query.shape[1] != key.shape[1] and "enable_gqa" in _ARGUMENTS
    return {"enable_gqa": True} if grouped else {}


_ARGUMENTS = varlen_attn.__kwdefaults__ or {}


class Copies:
    """Rows of a tensor, some of them several times. The gradients of a row's copies are summed in
    float32 and always in the same order: on a CPU by index_add, on a GPU by a kernel (index_add is slow
    there and has no fixed order).

    Example: Copies(torch.tensor([0, 1, 0]), of=2).taken_from(values) is values[[0, 1, 0]]
    """

    def __init__(self, row_F: Tensor, of: int) -> None:
        self.row_F = row_F
        self.rows = of

    def taken_from(self, values: Tensor) -> Tensor:
        found: Tensor = _Taken.apply(values, self)
        return found

    def summed(self, gradient: Tensor) -> Tensor:
        """The gradient of each row: the sum over its copies."""
        if gradient.is_cuda:
            from hacrl.policy.packing_kernels import sum_of_copies

            total = sum_of_copies(gradient.flatten(1).contiguous(), *self.by_row)
            return total.view(self.rows, *gradient.shape[1:])
        total = gradient.new_zeros((self.rows, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, self.row_F, gradient.float()).to(gradient.dtype)

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """Where each row's copies start in the second tensor, and the copies ordered by row."""
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
        return ctx.copies.summed(gradient), None


# ---------------------------------------------------------------- switching a model to packed attention

_active: tuple[Switch, Packed, LearningFusion | None] | None = None


@contextlib.contextmanager
def attending(
    switch: Switch, packed: Packed, fusion: LearningFusion | None = None
) -> Iterator[None]:
    """Inside the block the model attends over `packed`, with compiled small operations if given."""
    global _active
    before, _active = _active, (switch, packed, fusion)
    try:
        with switch.on(), doing(packed), fusion.on() if fusion else nullcontext():
            yield
    finally:
        _active = before


def attending_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of gradient checkpointing: a layer that is recomputed in the backward, after the
    block has ended, attends as in the forward."""
    return nullcontext(), attending(*_active) if _active else nullcontext()
