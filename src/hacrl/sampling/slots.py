"""The sampler's keys and values on a CPU: one slot a row, the simplest thing that is read fast.

Axis suffixes: R rows, K key heads, L tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hacrl.policy.attention import CacheShape, Rule, Work, causal, doing
from hacrl.sampling.cache import (
    PREFILL_TOKENS,
    Forward,
    Prefix,
    prefill_batches,
    prefill_ids,
)
from hacrl.sampling.decode import Rows, next_logits, prefill
from hacrl.sampling.transformers_cache import draw

BLOCK = 16
"""A decode step on a CPU reads a multiple of so many tokens: the numbers of its widest vectors."""
SMALLEST = 400
"""Multiplications of a product below which torch has a slow loop of its own for it."""


class SlotCache:
    """Row r lives in slot r; rows in use are the first ones, so a step reads them as one block.
    Slots are little longer than the longest row: what a step reads lies close together."""

    def __init__(self, shape: CacheShape, rows: int, longest: int) -> None:
        size = (rows, shape.heads, 0, shape.size)
        self.keys = [torch.zeros(size, dtype=shape.dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=shape.dtype) for _ in range(shape.layers)]
        self.longest = longest
        self._pending: dict[Prefix, list[int]] = {}
        self._hidden: dict[tuple[int, int | None], Tensor] = {}

    def admit(self, row: int, prefix: Prefix, more: bool) -> bool:
        self._pending.setdefault(prefix, []).append(row)
        return True

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        pass

    def fill(self, forward: Forward, pad_id: int) -> None:
        pending = [(p, rows) for p, rows in self._pending.items() if len(p) > 1]
        self._pending = {}
        prefixes = [p for p, _ in pending]
        self._lengthen(max(map(len, prefixes), default=0))
        for batch in prefill_batches(prefixes, PREFILL_TOKENS["cpu"]):
            ids = prefill_ids([prefixes[i] for i in batch], pad_id)
            rows = np.array([(row, b) for b, i in enumerate(batch) for row in pending[i][1]])
            forward(torch.from_numpy(ids), _SlotFill(self, rows[:, 0], rows[:, 1]))

    def grow(self, tokens_R: np.ndarray) -> bool:
        self._lengthen(int(tokens_R.max()))
        return True

    def _lengthen(self, tokens: int) -> None:
        """Slots for at least so many tokens, and a quarter more than before."""
        _, _, before, size = self.keys[0].shape
        if tokens > before:
            wanted = max(tokens, min(before + before // 4, self.longest))
            more = _blocks(wanted, size) - before
            for stored in (self.keys, self.values):
                for layer, old in enumerate(stored):
                    longer = old.new_empty(*old.shape[:2], before + more, size)
                    longer[:, :, :before] = old
                    longer[:, :, before:] = 0
                    stored[layer] = longer

    def hidden_at(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[positions, length], the last position first: -inf for what a token there does not see."""
        known = self._hidden.get((length, window))
        if known is None:
            # Rows of one strip, each a place further: a table would grow with the square.
            distance = torch.arange(length - 1, -length, -1)
            strip = torch.zeros(len(distance), dtype=dtype)
            strip[(distance < 0) | (distance >= (window or length))] = float("-inf")
            known = self._hidden[length, window] = strip.unfold(0, length, 1)
        return known

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        source, target = torch.from_numpy(sources), torch.from_numpy(targets)
        for stored in (*self.keys, *self.values):
            stored.index_copy_(0, target, stored.index_select(0, source))

    def release(self, row: int) -> None:
        pass


@dataclass
class _SlotFill:
    """Prompts: attends, and spreads each prompt's keys and values to the rows that continue it."""

    cache: SlotCache
    rows: np.ndarray
    sources: np.ndarray

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        length = key.shape[2]
        _bits(self.cache.keys[layer])[self.rows, :, :length] = _bits(key)[self.sources]
        _bits(self.cache.values[layer])[self.rows, :, :length] = _bits(value)[self.sources]
        return causal(query, key, value, rule)


class SlotStep:
    """One new token for each of the first rows.

    Rows and key heads are one batch of small products. What a step reads is cut at a multiple of
    BLOCK tokens: the products and the softmax of shorter or odd lengths take up to three times as
    long.
    """

    def __init__(
        self,
        cache: SlotCache,
        position_R: Tensor,
        computed: np.ndarray | None = None,
        copy_R: np.ndarray | None = None,
    ) -> None:
        """The model computes all rows, or those of `computed`, of which row r is the `copy_R[r]`th."""
        _, heads, _, size = cache.keys[0].shape
        self.cache, self.computed, self.copy_R = cache, computed, copy_R
        self.length = _blocks(int(position_R.max()) + 1, size)
        self.place = np.arange(position_R.shape[0]), slice(None), position_R.numpy()
        position_C = position_R if computed is None else position_R[computed]
        self.position_P = position_C.repeat_interleave(heads)
        """Of every product of a layer: the key heads of the rows that are computed."""
        self.products = self.position_P.shape[0]
        self._hidden: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        count, heads, _, size = query.shape
        keys = self._store(self.cache.keys[layer], key)
        values = self._store(self.cache.values[layer], value)
        # The query heads of a group stand where several query tokens would: no copy of the keys.
        # For one token a row two products beat the library's kernels, whose blocks would be empty.
        grouped = query.reshape(self.products, -1, size)
        hidden = self._hidden_by(rule.window, query.dtype)
        if rule.cap is None:
            scores = torch.baddbmm(hidden, grouped, keys.transpose(1, 2), alpha=rule.scale)
        else:
            scores = grouped @ keys.transpose(1, 2) * rule.scale
            scores = rule.cap * torch.tanh(scores / rule.cap) + hidden
        return torch.bmm(scores.softmax(-1), values).view(count, 1, heads, size)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        """Put the new token in its place; what there is to read, [rows and heads, tokens, D]."""
        new = new if self.copy_R is None else new[self.copy_R]
        _bits(stored)[self.place] = _bits(new.squeeze(2))
        stored = stored if self.computed is None else stored[self.computed]
        return stored.flatten(0, 1)[: self.products, : self.length]

    def _hidden_by(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """-inf where a row has nothing yet, or what has left the window."""
        if window not in self._hidden:
            every = self.cache.hidden_at(self.length, window, dtype)
            self._hidden[window] = every.index_select(
                0, self.length - 1 - self.position_P
            ).unsqueeze(1)
        return self._hidden[window]


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's memory for numpy, which puts rows in scattered places in half of torch's time and
    does not know all kinds of numbers."""
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32).numpy()


def _blocks(tokens: int, size: int) -> int:
    """Tokens of a head of this size that a step reads for so many."""
    return max(-(-tokens // BLOCK), -(-SMALLEST // (BLOCK * size))) * BLOCK


class Passes(Protocol):
    """What a sampler asks of a model, while a work attends."""

    def __call__(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        """[R, V] after one more token a row."""

    def fill(self, ids_BL: Tensor) -> None:
        """Prompts, padded on the right: only what attention stores is wanted."""


class LibraryForward:
    """The model's own forward, whatever is in it.

    Example: passes = LibraryForward(model); passes.fill(prompts_BL); passes(token_R, position_R)
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        return next_logits(self.model, token_R, position_R)

    def fill(self, ids_BL: Tensor) -> None:
        prefill(self.model, ids_BL)


class HostDecoder:
    """A step is a forward; the host looks after every one."""

    steps = 1

    def __init__(self, passes: Passes, cache: SlotCache, temperature: float) -> None:
        self.passes, self.cache, self.temperature = passes, cache, temperature

    def prefill(self, ids_BL: Tensor, work: Work) -> None:
        with doing(work):
            self.passes.fill(ids_BL)

    def run(self, rows: Rows, count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        token, position, key, index = (
            torch.from_numpy(a[:count]) for a in (rows.token, rows.position, rows.key, rows.index)
        )
        twin_R, self_R = rows.twin[:count], np.arange(count)
        if (twin_R == self_R).all():
            with doing(SlotStep(self.cache, position)):
                logits_RV = self.passes(token, position)
        else:
            # Rows that begin the same prompt have the same next logits: one of them is computed.
            first, copy = np.unique(twin_R, return_inverse=True)
            rows.twin[:count] = self_R
            with doing(SlotStep(self.cache, position, first, copy)):
                logits_RV = self.passes(token[first], position[first])[copy]
        token_R, logprob_R = draw(logits_RV, key, index, self.temperature)
        return token_R.numpy()[:, None], logprob_R.numpy()[:, None]
