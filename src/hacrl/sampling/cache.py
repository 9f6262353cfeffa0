"""The paged KV cache of the GPU engine.

Keys and values live in pages of PAGE tokens, so rows of different lengths use one fixed block of memory.
A row owns the pages that it has filled; rows with the same prompt share the full pages of that prompt.
The memory is allocated once, because CUDA graphs hold its addresses, and all samplers on a device use
the same memory, because agents of one process sample one after the other.

A row starts from a prefix: its prompt, or prompt and partial reply after a preemption. `fill` stores
keys and values of all tokens of the prefix but the last; the last token is the row's first decode step.

Axis suffixes: B prompts, L tokens, R rows, K key heads, D head size, N tokens of all prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.policy.attention import CacheShape, Rule, Work, causal, doing
from hacrl.policy.microbatch import plan_microbatches

PAGE = 64  # tokens in a page
PREFILL_TOKENS = 32768  # maximum prompt tokens, padding included, in one forward pass

ARENAS: dict[torch.device, Tensor] = {}
"""Each device's memory for keys and values, used by all samplers of the process."""

Prefix = tuple[int, ...]


def device_memory(device: torch.device) -> int:
    """Total memory of the device in bytes."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def prefill(model: Any, ids_BL: Tensor, work: Work) -> None:
    """Run the model over right-padded prompts; `work` attends and stores keys and values."""
    with doing(work):
        model(input_ids=ids_BL, use_cache=False, logits_to_keep=1)


def pages_for(tokens: int) -> int:
    """Number of pages that hold this many tokens."""
    return -(-tokens // PAGE)


@dataclass
class _SharedPrefix:
    """Pages of a prefix that several rows start from."""

    prefix: Prefix
    full: list[int]  # full pages, referenced by all rows
    tail: int | None  # the last, partly filled page; each row gets a copy
    held: bool = True  # keep the pages: more rows will start from this prefix

    @property
    def pages(self) -> list[int]:
        return self.full if self.tail is None else [*self.full, self.tail]


class PagedCache:
    """Assigns the pages of the arena to rows and prefixes. Page 0 is never assigned: idle rows of a
    captured decode step write to it."""

    def __init__(self, shape: CacheShape, device: torch.device, rows: int) -> None:
        self.shape, self.device = shape, device
        self.page_bytes = shape.token_bytes * PAGE
        self._arena: tuple[int, int] | None = None  # address and size at the last call of `reserve`
        self.table = np.zeros((rows, 1), np.int32)  # [R, pages of a row]
        self._rows: dict[int, list[int]] = {}
        self._shared: dict[Prefix, _SharedPrefix] = {}
        self._free: list[int] = []
        self._references: dict[int, int] = {}
        self._to_fill: list[_SharedPrefix] = []
        self._to_copy: list[tuple[int, int]] = []

    def reserve(self, pages: int, width: int) -> bool:
        """Clear the cache and provide `pages` pages, `width` of them per row. Returns True if
        addresses changed, so that CUDA graphs must be captured again."""
        size = (pages + 1) * self.page_bytes
        if self.device not in ARENAS or len(ARENAS[self.device]) < size:
            ARENAS.pop(self.device, None)  # free the old memory first
            ARENAS[self.device] = torch.empty(size, dtype=torch.uint8, device=self.device)
        arena = ARENAS[self.device].data_ptr(), len(ARENAS[self.device])
        changed = arena != self._arena or self.table.shape[1] < width
        self._arena = arena
        if changed:
            width = max(width, self.table.shape[1])
            self.table = np.zeros((len(self.table), width), np.int32)
        # The last call may have been interrupted and may have left rows behind.
        self.table[:] = 0
        self._rows, self._shared, self._references = {}, {}, {}
        self._to_fill, self._to_copy = [], []
        self._free = list(range(self.pages.shape[2] - 1, 0, -1))
        return changed

    @property
    def pages(self) -> Tensor:
        """All pages, [layers, 2, pages, K, PAGE, D]."""
        arena, shape = ARENAS[self.device], self.shape
        count = len(arena) // self.page_bytes
        used = arena[: count * self.page_bytes].view(shape.dtype)
        return used.view(shape.layers, 2, count, shape.heads, PAGE, shape.size)

    @property
    def free(self) -> int:
        """Number of unassigned pages."""
        return len(self._free)

    def admit(self, row: int, prefix: Prefix, more: bool) -> bool:
        """Assign pages to a new row. Returns False if there are too few. `more`: other waiting rows
        start from the same prefix."""
        if not self._rows and self.free < 1 + pages_for(len(prefix) - 1):
            self._drop_prefixes()  # no active row will free pages
        shared = self._shared.get(prefix)
        new = 1 + (0 if shared else pages_for(len(prefix) - 1))
        # Keep one page for every active row, so that admission does not cause a preemption at once.
        if self.free < new + len(self._rows):
            return False
        shared = shared or self._add_prefix(prefix)
        page = self._allocate()
        for full in shared.full:
            self._references[full] += 1
        if shared.tail is not None:
            self._to_copy.append((shared.tail, page))
        self._rows[row] = [*shared.full, page]
        self._write_table(row)
        shared.held = more
        return True

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        """Add prefixes of waiting rows to the next prefill, while at least half of the pages that they
        could need stay free."""
        for prefix in prefixes if self._to_fill else ():
            needed = pages_for(len(prefix) - 1) + len(self._rows)
            if prefix not in self._shared and self.free >= 2 * needed:
                self._add_prefix(prefix)

    def fill(self, model: Any, pad_id: int) -> None:
        """Prefill the new prefixes and copy their last pages to the rows."""
        prefixes = [s.prefix for s in self._to_fill]
        for batch in plan_microbatches(list(map(len, prefixes)), PREFILL_TOKENS, padded=True):
            ids = [torch.tensor(prefixes[i][:-1]) for i in batch]
            ids_BL = pad_sequence(ids, batch_first=True, padding_value=pad_id)
            prefill(model, ids_BL.to(self.device), self._prefill_attention(batch))
        self._to_fill = []
        if self._to_copy:
            pages, copies = self.pages, torch.tensor(self._to_copy, device=self.device)
            pages[:, :, copies[:, 1]] = pages[:, :, copies[:, 0]]
        self._to_copy = []
        for shared in [s for s in self._shared.values() if not s.held]:
            self._drop_prefix(shared)

    def grow(self, tokens_R: np.ndarray) -> bool:
        """Assign pages for this many tokens to each of the first rows. Returns False if there are too
        few pages."""
        wanted_R = -(-tokens_R // PAGE)
        held_R = np.count_nonzero(self.table[: len(wanted_R)], axis=1)
        for row in (wanted_R > held_R).nonzero()[0].tolist():  # the GPU waits: few rows need a page
            while len(self._rows[row]) < wanted_R[row]:
                if not self._free:
                    self._drop_prefixes()
                if not self._free:
                    return False
                self._rows[row].append(self._allocate())
                self._write_table(row)
        return True

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Move rows to unused row numbers."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._rows[target] = self._rows.pop(source)
        self.table[targets] = self.table[sources]
        self.table[sources] = 0

    def release(self, row: int) -> None:
        """Free the row's pages."""
        for page in self._rows.pop(row):
            self._dereference(page)
        self.table[row] = 0

    def _add_prefix(self, prefix: Prefix) -> _SharedPrefix:
        full, rest = divmod(len(prefix) - 1, PAGE)
        pages = [self._allocate() for _ in range(full)]
        shared = _SharedPrefix(prefix, pages, self._allocate() if rest else None)
        self._shared[prefix] = shared
        if len(prefix) > 1:
            self._to_fill.append(shared)
        return shared

    def _drop_prefixes(self) -> None:
        """Free the pages of all prefixes that only waiting rows need; they can be prefilled again."""
        for shared in list(self._shared.values()):
            self._drop_prefix(shared)

    def _drop_prefix(self, shared: _SharedPrefix) -> None:
        del self._shared[shared.prefix]
        for page in shared.pages:
            self._dereference(page)

    def _prefill_attention(self, batch: Sequence[int]) -> _PrefillAttention:
        page, source, place = [], [], []
        for b, i in enumerate(batch):
            at = np.arange(len(self._to_fill[i].prefix) - 1)
            page.append(np.asarray(self._to_fill[i].pages)[at // PAGE])
            source.append(np.full(len(at), b))
            place.append(at)
        page_N, source_N, place_N = (
            torch.from_numpy(np.concatenate(x)).to(self.device) for x in (page, source, place)
        )
        return _PrefillAttention(self.pages, page_N, place_N % PAGE, source_N, place_N)

    def _allocate(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _dereference(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def _write_table(self, row: int) -> None:
        pages = self._rows[row]
        self.table[row, : len(pages)] = pages


@dataclass
class _PrefillAttention:
    """Causal attention over prompts that also stores keys and values in their pages."""

    pages: Tensor
    page_N: Tensor
    offset_N: Tensor  # position of each token in its page
    source_N: Tensor  # prompt of each token
    place_N: Tensor  # position of each token in its prompt

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        for side, new in enumerate((key, value)):
            stored = self.pages[layer, side]
            stored[self.page_N, :, self.offset_N] = new[self.source_N, :, self.place_N]
        return causal(query, key, value, rule)
