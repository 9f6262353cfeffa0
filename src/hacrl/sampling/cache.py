"""Where the sampler keeps keys and values: one slot a row on a CPU (slots.py), pages on a GPU.

Pages let many rows of unequal length share a fixed arena: a row holds as many pages as it has
filled, and the rows that continue one prompt share the pages of that prompt. The arena is allocated
once and kept, because captured graphs hold its addresses, and all agents on a device use the same
one, because they sample in turn.

Axis suffixes: B prompts, R rows, K key heads, L tokens, D head size, N tokens in one line.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from hacrl.policy.attention import CacheShape, Rule, Work, causal

PAGE = 64
"""Tokens of a page."""
PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Most prompt tokens, padding included, in one forward pass."""

Prefix = tuple[int, ...]
Forward = Callable[[Tensor, Work], object]
"""Runs the model over ids [B, L], padded on the right, with this work attending."""


class Cache(Protocol):
    """Memory of the rows that are being written. A row continues a prefix: of all its ids but the
    last, keys and values are stored by `fill`; the last is the row's first decode step."""

    def admit(self, row: int, prefix: Prefix, more: bool) -> bool:
        """Make room for a row; False where there is none now. `more`: others continue it too."""

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        """These come next; if anything must be filled now, they may be filled along with it."""

    def fill(self, forward: Forward, pad_id: int) -> None:
        """Store what was admitted."""

    def grow(self, tokens_R: np.ndarray) -> bool:
        """Make room for so many tokens in each of the first rows; False where there is none."""

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Rows take other, free, places."""

    def release(self, row: int) -> None: ...


def batches(prefixes: Sequence[Prefix], most: int) -> list[list[int]]:
    """Prefixes of similar length together, at most `most` tokens with padding."""
    order = sorted(range(len(prefixes)), key=lambda i: -len(prefixes[i]))
    batches: list[list[int]] = []
    for i in order:
        width = len(prefixes[batches[-1][0]]) if batches else 0
        if batches and width * (len(batches[-1]) + 1) <= most:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def padded(prefixes: Sequence[Prefix], pad_id: int) -> np.ndarray:
    """All but the last token of each, padded on the right."""
    ids = np.full((len(prefixes), max(len(p) for p in prefixes) - 1), pad_id, np.int64)
    for row, prefix in zip(ids, prefixes, strict=True):
        row[: len(prefix) - 1] = prefix[:-1]
    return ids


# ---------------------------------------------------------------- pages


class Arena:
    """A device's memory for keys and values, shared by the samplers of a process."""

    _of: ClassVar[dict[torch.device, Arena]] = {}

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.users: weakref.WeakSet[PagedCache] = weakref.WeakSet()

    @classmethod
    def of(cls, device: torch.device) -> Arena:
        return cls._of.setdefault(device, cls())

    def grow_to(self, size: int, device: torch.device) -> None:
        """At least `size` bytes. Everyone's views (and the graphs made with them) end here."""
        if size > len(self.bytes):
            for user in self.users:
                user.pages = None
            self.bytes = torch.empty(0, dtype=torch.uint8)
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)


@dataclass
class _Shared:
    """The pages of a prefix that several rows continue."""

    prefix: Prefix
    full: list[int]
    """Pages that are full, shared as they are."""
    tail: int | None
    """The last page, part full, of which each row gets a copy."""
    held: bool = True
    """Rows that continue it are still to come."""


class PagedCache:
    """Pages of one arena, handed out to rows and prefixes. Page 0 belongs to nobody: free rows of a
    captured step write there."""

    def __init__(self, shape: CacheShape, device: torch.device, rows: int) -> None:
        self.shape, self.device = shape, device
        self.arena = Arena.of(device)
        self.pages: Tensor | None = None
        """[layers, 2, pages, K, PAGE, D]; None: to be taken anew, and all graphs with it."""
        self.page_bytes = shape.token_bytes * PAGE
        self.table = np.zeros((rows, 1), np.int32)
        """[R, pages of a row]"""
        self._held = np.zeros(rows, np.int64)
        self._rows: dict[int, list[int]] = {}
        self._shared: dict[Prefix, _Shared] = {}
        self._free: list[int] = []
        self._references: dict[int, int] = {}
        self._to_fill: list[_Shared] = []
        self._to_copy: list[tuple[int, int]] = []

    def reserve(self, pages: int, width: int) -> bool:
        """Have `pages` pages and rows of up to `width` of them; True if addresses changed."""
        self.arena.users.add(self)
        self.arena.grow_to((pages + 1) * self.page_bytes, self.device)
        changed = self.pages is None or self.table.shape[1] < width
        if self.pages is None:
            count = len(self.arena.bytes) // self.page_bytes
            taken = self.arena.bytes[: count * self.page_bytes].view(self.shape.dtype)
            heads, size = self.shape.heads, self.shape.size
            self.pages = taken.view(self.shape.layers, 2, count, heads, PAGE, size)
        if changed:
            width = max(width, self.table.shape[1])
            self.table = np.zeros((len(self.table), width), np.int32)
        # Whoever wrote before may have been interrupted: nothing of it stays.
        self.table[:] = self._held[:] = 0
        self._rows, self._shared, self._references = {}, {}, {}
        self._to_fill, self._to_copy = [], []
        self._free = list(range(self.pages.shape[2] - 1, 0, -1))
        return changed

    @property
    def free(self) -> int:
        return len(self._free)

    def admit(self, row: int, prefix: Prefix, more: bool) -> bool:
        if not self._rows and self.free < 1 + self._pages_of(prefix):
            self._forget_prepared()  # nobody is left who would give pages back
        shared = self._shared.get(prefix)
        new = 1 + (0 if shared else self._pages_of(prefix))
        # Every row in work can still take one page before this one gets any.
        if self.free < new + len(self._rows):
            return False
        shared = shared or self._share(prefix)
        pages = [self._take()]
        for page in shared.full:
            self._references[page] += 1
        if shared.tail is not None:
            self._to_copy.append((shared.tail, pages[0]))
        self._rows[row] = [*shared.full, *pages]
        self._write_table(row)
        shared.held = more
        return True

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        for prefix in prefixes if self._to_fill else ():
            need = self._pages_of(prefix) + len(self._rows)
            if prefix in self._shared or self.free < 2 * need:
                continue
            self._share(prefix)

    def _pages_of(self, prefix: Prefix) -> int:
        return -(-(len(prefix) - 1) // PAGE)

    def _share(self, prefix: Prefix) -> _Shared:
        full, rest = divmod(len(prefix) - 1, PAGE)
        shared = _Shared(
            prefix, [self._take() for _ in range(full)], self._take() if rest else None
        )
        self._shared[prefix] = shared
        if len(prefix) > 1:
            self._to_fill.append(shared)
        return shared

    def fill(self, forward: Forward, pad_id: int) -> None:
        prefixes = [s.prefix for s in self._to_fill]
        for batch in batches(prefixes, PREFILL_TOKENS["cuda"]):
            ids = padded([prefixes[i] for i in batch], pad_id)
            forward(torch.from_numpy(ids).to(self.device), self._fill_work(batch))
        self._to_fill = []
        if self._to_copy:
            assert self.pages is not None
            copies = torch.tensor(self._to_copy, device=self.device)
            self.pages[:, :, copies[:, 1]] = self.pages[:, :, copies[:, 0]]
        self._to_copy = []
        for shared in [s for s in self._shared.values() if not s.held]:
            self._forget(shared)

    def _fill_work(self, batch: Sequence[int]) -> _PageFill:
        page, source, place = [], [], []
        for b, i in enumerate(batch):
            shared = self._to_fill[i]
            pages = [*shared.full, *([] if shared.tail is None else [shared.tail])]
            at = np.arange(len(shared.prefix) - 1)
            page.append(np.asarray(pages)[at // PAGE])
            source.append(np.full(len(at), b))
            place.append(at)
        page_N, source_N, place_N = (
            torch.from_numpy(np.concatenate(x)).to(self.device) for x in (page, source, place)
        )
        assert self.pages is not None
        return _PageFill(self.pages, page_N, place_N % PAGE, source_N, place_N)

    def grow(self, tokens_R: np.ndarray) -> bool:
        wanted_R = -(-tokens_R // PAGE)
        for row in (wanted_R > self._held[: len(wanted_R)]).nonzero()[0].tolist():
            while len(self._rows[row]) < wanted_R[row]:
                if not self._free:
                    self._forget_prepared()
                if not self._free:
                    return False
                self._rows[row].append(self._take())
                self._write_table(row)
        return True

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._rows[target] = self._rows.pop(source)
        for array in (self.table, self._held):
            array[targets] = array[sources]
            array[sources] = 0

    def release(self, row: int) -> None:
        for page in self._rows.pop(row):
            self._give(page)
        self.table[row] = self._held[row] = 0

    def _forget_prepared(self) -> None:
        """Prefixes that wait for rows can be computed again; rows in work come first."""
        for shared in list(self._shared.values()):
            self._forget(shared)

    def _forget(self, shared: _Shared) -> None:
        del self._shared[shared.prefix]
        for page in [*shared.full, *([] if shared.tail is None else [shared.tail])]:
            self._give(page)

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _give(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def _write_table(self, row: int) -> None:
        pages = self._rows[row]
        self.table[row, : len(pages)] = pages
        self._held[row] = len(pages)


@dataclass
class _PageFill:
    """Prompts: attends, and writes keys and values to their pages."""

    pages: Tensor
    page_N: Tensor
    offset_N: Tensor
    source_N: Tensor
    place_N: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        for side, new in enumerate((key, value)):
            stored = self.pages[layer, side]
            stored[self.page_N, :, self.offset_N] = new[self.source_N, :, self.place_N]
        return causal(query, key, value, rule)
