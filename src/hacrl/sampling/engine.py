"""The built-in sampler: the trainer's own weights, a cache of our own, counter-based noise.

Rows are written side by side; a finished row makes place for a waiting one, the samples of a prompt
share its prefill, and what a row writes depends on nothing but weights, prompt and key.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hacrl.config import SamplerConfig
from hacrl.errors import UserError
from hacrl.policy.attention import CacheShape, ShapeFinder, Switch, doing
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.cache import PAGE, PREFILL_TOKENS, Cache, PagedCache, Prefix
from hacrl.sampling.decode import (
    Decoder,
    DeviceDecoder,
    HostDecoder,
    LibraryForward,
    Passes,
    Rows,
)
from hacrl.sampling.lean import LeanForward, fits
from hacrl.sampling.slots import SlotCache
from hacrl.sampling.transformers_cache import TransformersSampler

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy

AHEAD = 64
"""Prompts that are prefilled along with one that is needed now."""
FAR = 32768
"""Tokens of a model that does not tell how many it reads."""
EXACT, ROUNDED, MISTAKEN = 1e-4, 0.05, 0.15
"""How far logits with our cache may lie from the model's own, as a part of their norm: in float32; in
half precision; and the most there, where the library's own kinds of attention lie far apart as well
(rounding makes it 0.02 for random weights of 0.6B, 0.045 for 4B). A cache that forgets a token or shows
too few makes it 0.17 and more, even in models of 1M weights."""


class BuiltinSampler:
    """Writes replies side by side, at most `rows` at a time, from the weights the trainer updates.

    Keys and values take at most `cache_share` of a device's memory; where that is too little for all
    rows, fewer are written side by side. A model whose attention does not go through transformers'
    interface is sampled with the library's own cache (plain_sampler.py).
    """

    def __init__(
        self,
        model: Any,
        end_ids: Sequence[int],
        pad_id: int,
        rows: int,
        *,
        cache_share: float = 0.2,
    ) -> None:
        self.model = model
        self.end_ids = tuple(end_ids)
        self.pad_id = pad_id
        self.rows = rows
        self.cache_share = cache_share
        self._switch = Switch(model)
        self._shape: CacheShape | None = None
        self._known = False
        self._lean = False
        """Whether the scheme of lean.py gives the model's own logits."""
        self._pages: PagedCache | None = None
        self._captured: DeviceDecoder | None = None

    def weights_changed(self) -> None:
        """Nothing to do: the weights are the trainer's own tensors."""

    @property
    def cache_kind(self) -> str:
        """Where keys and values lie: "pages" of a GPU, "slots" of a CPU, or the "library"'s own cache
        (plain_sampler.py). "unknown" before the first request."""
        if not self._known:
            return "unknown"
        if self._shape is None:
            return "library"
        return "slots" if self.model.device.type == "cpu" else "pages"

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        if not requests:
            return []
        if not self._known:
            self._shape, self._known = self._find_shape(), True
        if self._shape is None:
            plain = TransformersSampler(self.model, self.end_ids, self.pad_id, self.rows)
            return plain.sample(requests, temperature)
        with self._switch.on():
            cache, decoder, rows = self._set_up(self._shape, requests, temperature)
            return _Writing(self, requests, cache, decoder, rows).run()

    # ------------------------------------------------------------ what it works with

    def _set_up(
        self, shape: CacheShape, requests: Sequence[Request], temperature: float
    ) -> tuple[Cache, Decoder, int]:
        rows = min(self.rows, len(requests))
        longest = max(len(r.prompt_ids) + r.limit for r in requests)
        if self.model.device.type == "cpu":
            fit = int(self.cache_share * _host_memory()) // (longest * shape.token_bytes)
            rows = min(rows, max(fit, 1))
            slots = SlotCache(shape, rows, longest)
            passes: Passes = LibraryForward(self.model)
            if self._lean and fits(self.model):
                passes = LeanForward(self.model, longest if _steady(self.model) else None)
            return slots, HostDecoder(passes, slots, temperature), rows
        device = self.model.device
        if self._pages is None or len(self._pages.table) < self.rows:
            self._pages = PagedCache(shape, device, self.rows)
        width = -(-longest // PAGE) + 1
        prompts = {r.prompt_ids for r in requests}
        wanted = max(2, rows) * width + sum(-(-len(p) // PAGE) for p in prompts)
        whole = torch.cuda.get_device_properties(device).total_memory
        pages = min(wanted, int(self.cache_share * whole) // self._pages.page_bytes)
        if pages < 2 * width:
            raise UserError(
                f"a sequence of {longest} tokens needs {width * self._pages.page_bytes / 2**30:.1f} "
                f"GiB of keys and values, but sampler.cache_fraction = {self.cache_share} of the GPU "
                f"holds {pages * self._pages.page_bytes / 2**30:.1f} GiB, less than two of them. "
                "Raise it, or lower max_prompt_tokens or max_response_tokens."
            )
        changed = self._pages.reserve(pages, width)
        if changed or self._captured is None or self._captured.end_ids != self.end_ids:
            self._captured = None  # free the graphs of the old addresses first
            self._captured = DeviceDecoder(
                self.model, self._pages, self.end_ids, self.rows, capture=_steady(self.model)
            )
        self._captured.set_temperature(temperature)
        return self._pages, self._captured, rows

    @property
    def _exchangeable(self) -> bool:
        return bool(getattr(self.model, "_supports_attention_backend", False))

    def _find_shape(self) -> CacheShape | None:
        """What the cache must hold; None where our attention is not the model's, or keys and values
        are not all that a next token needs (layers with a state of another kind)."""
        count = self.model.get_input_embeddings().weight.shape[0]
        ids = (torch.arange(8, device=self.model.device) * 7 % count).unsqueeze(0)
        # The plainest attention, where it can be chosen: others leave out what they cannot do.
        with self._switch.on("eager") if self._exchangeable else nullcontext():
            own = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        shape = self._probe(LibraryForward(self.model), ids, own)
        # Half precision rounds more than what some models do otherwise would show.
        sharp = shape is not None and shape.dtype == torch.float32
        if sharp and self.model.device.type == "cpu" and fits(self.model):
            # Parts may be of another shape than they look.
            with suppress(AttributeError, RuntimeError, TypeError, ValueError):
                lean = LeanForward(self.model)
                found = self._probe(lean, ids, own, tells=False)
                self._lean = found == shape and self._right_far_on(lean, ids)
        return shape

    def _right_far_on(self, passes: Passes, ids_1L: Tensor) -> bool:
        """Whether a step at the model's last position is the library's: some scale by position. And
        whether its layers see as far back."""
        last = (getattr(self.model.config, "max_position_embeddings", None) or FAR) - 1
        library, theirs, ours = LibraryForward(self.model), ShapeFinder(), ShapeFinder()
        own_V = self._trial(library, ids_1L, last, theirs)
        ours_V = self._trial(passes, ids_1L, last, ours)
        near = bool((ours_V - own_V).norm() < 1e-4 * own_V.norm())
        return near and ours.limits == theirs.limits

    def _probe(
        self, passes: Passes, ids_1L: Tensor, own_V: Tensor, *, tells: bool = True
    ) -> CacheShape | None:
        """What the layers hand over if the last of these tokens is a decode step; None where that
        does not give the model's own logits, which is told."""
        finder = ShapeFinder()
        try:
            ours_V = self._trial(passes, ids_1L, ids_1L.shape[1] - 1, finder)
        except (AttributeError, TypeError, KeyError):
            return None
        gap, half = _gap(ours_V, own_V), ours_V.dtype != torch.float32
        allowed = ROUNDED if half else EXACT
        if half and gap >= allowed:
            allowed = min(max(allowed, 2 * self._rounding(ids_1L, own_V)), MISTAKEN)
        if gap < allowed:
            return finder.shape()
        if tells:
            warnings.warn(
                f"with a cache of ours the model's logits are off by {gap:.2g} of their norm, where "
                f"rounding explains {allowed:.2g}, so replies are written with the library's own cache, "
                "which is several times slower. That is right for layers that keep more than keys and "
                "values; for a model of plain attention please report it.",
                stacklevel=2,
            )
        return None

    def _rounding(self, ids_1L: Tensor, own_V: Tensor) -> float:
        """How far another attention of the library, which computes the same, lies from its plainest."""
        if not self._exchangeable:
            return 0.0
        with self._switch.on("sdpa"):
            logits_1LV = self.model(input_ids=ids_1L, use_cache=False, logits_to_keep=1).logits
        return _gap(logits_1LV[0, -1], own_V)

    def _trial(self, passes: Passes, ids_1L: Tensor, position: int, finder: ShapeFinder) -> Tensor:
        """[V] of a decode step of the last of these tokens, put at this position."""
        last = ids_1L[:, -1]
        with self._switch.on(), doing(finder):
            passes.fill(ids_1L[:, :-1])
            return passes(last, torch.full_like(last, position))[0]


def builtin_sampler(policy: Policy, settings: SamplerConfig) -> BuiltinSampler:
    """The built-in sampler of a policy."""
    return BuiltinSampler(
        policy.model,
        policy.renderer.end_ids,
        policy.renderer.pad_id,
        policy.agent.sampler_rows,
        cache_share=settings.cache_fraction,
    )


class _Writing:
    """One call of `sample`: which request sits in which row, and what was written."""

    def __init__(
        self,
        sampler: BuiltinSampler,
        requests: Sequence[Request],
        cache: Cache,
        decoder: Decoder,
        rows: int,
    ) -> None:
        self.sampler, self.requests, self.cache, self.decoder = sampler, requests, cache, decoder
        self.most = rows
        self.count = 0
        """Rows in work: the first so many."""
        self.rows = Rows(rows)
        longest = max(r.limit for r in requests)
        self.ids = np.zeros((len(requests), longest), np.int64)
        self.logprobs = np.zeros((len(requests), longest), np.float32)
        self.lengths = np.zeros(len(requests), np.int64)
        self.stopped = np.zeros(len(requests), bool)
        self.ends = np.array(sampler.end_ids, np.int64)
        self.waiting = deque(range(len(requests)))
        self.prefixes: dict[int, Prefix] = {i: r.prompt_ids for i, r in enumerate(requests)}
        """Of the requests that wait: what their row will continue."""
        self.siblings = Counter(self.prefixes.values())
        self.admissions = 0

    def run(self) -> list[Reply]:
        while self.waiting or self.count:
            self._admit()
            ticks = self._ticks()
            self._make_room(ticks)
            ticks = min(ticks, self._ticks())
            token, logprob = self.decoder.run(self.rows, self.count, ticks)
            self._write_down(token, logprob)
        return [
            Reply(tuple(ids[:n].tolist()), tuple(logprobs[:n].tolist()), bool(stopped))
            for ids, logprobs, n, stopped in zip(
                self.ids, self.logprobs, self.lengths, self.stopped, strict=True
            )
        ]

    def _ticks(self) -> int:
        left = self.rows.limit[: self.count] - self.rows.index[: self.count]
        return min(self.decoder.ticks, max(1, int(left.max())))

    def _admit(self) -> None:
        """Waiting requests take the free rows, as far as the cache has room."""
        before = self.count
        first: dict[Prefix, int] = {}
        while self.waiting and self.count < self.most:
            i = self.waiting[0]
            prefix, request = self.prefixes[i], self.requests[i]
            if not self.cache.admit(self.count, prefix, more=self.siblings[prefix] > 1):
                break
            self.waiting.popleft()
            del self.prefixes[i]
            self.siblings[prefix] -= 1
            rows, row = self.rows, self.count
            rows.request[row], rows.key[row], rows.limit[row] = i, request.key, request.limit
            rows.token[row], rows.position[row] = prefix[-1], len(prefix) - 1
            rows.index[row] = self.lengths[i]
            rows.admitted[row] = self.admissions
            rows.twin[row] = first.setdefault(prefix, row)
            self.admissions += 1
            self.count += 1
        if self.count > before:
            self.cache.prepare(self._next_prefixes())
            self.cache.fill(self.decoder.read, self.sampler.pad_id)

    def _next_prefixes(self) -> Iterator[Prefix]:
        """Of the next requests, as many prompts as one forward pass takes along."""
        seen: set[Prefix] = set()
        tokens = 0
        for prefix in map(self.prefixes.__getitem__, self.waiting):
            if prefix not in seen:
                tokens += len(prefix)
                if len(seen) == AHEAD or tokens > PREFILL_TOKENS["cuda"] // 2:
                    return
                seen.add(prefix)
                yield prefix

    def _make_room(self, ticks: int) -> None:
        """Room for the next steps in every row; where there is none, the newest row waits again."""
        rows = self.rows
        while self.count:
            left_R = rows.limit[: self.count] - rows.index[: self.count]
            if self.cache.grow(rows.position[: self.count] + np.minimum(left_R, ticks)):
                return
            self._put_back(int(rows.admitted[: self.count].argmax()))

    def _put_back(self, row: int) -> None:
        """The row's request waits again, as the continuation of what it has written."""
        i = int(self.rows.request[row])
        prefix = (*self.requests[i].prompt_ids, *self.ids[i, : self.lengths[i]].tolist())
        self.prefixes[i] = prefix
        self.siblings[prefix] += 1
        self.waiting.appendleft(i)
        self._free(np.array([row]))

    def _write_down(self, token_RT: np.ndarray, logprob_RT: np.ndarray) -> None:
        rows, count = self.rows, self.count
        request_R, index_R, limit_R = (a[:count] for a in (rows.request, rows.index, rows.limit))
        ticks = token_RT.shape[1]
        ended_RT = (token_RT[:, :, None] == self.ends).any(2)
        end_R = np.where(ended_RT.any(1), ended_RT.argmax(1) + 1, ticks + 1)
        written_R = np.minimum(np.minimum(end_R, limit_R - index_R), ticks)
        row_N, tick_N = (np.arange(ticks) < written_R[:, None]).nonzero()
        place = request_R[row_N], index_R[row_N] + tick_N
        self.ids[place] = token_RT[row_N, tick_N]
        self.logprobs[place] = logprob_RT[row_N, tick_N]
        stopped_R = end_R <= written_R
        self.stopped[request_R] = stopped_R
        rows.position[:count] += written_R
        rows.token[:count] = token_RT[np.arange(count), written_R - 1]
        index_R += written_R
        self.lengths[request_R] = index_R
        self._free((stopped_R | (index_R >= limit_R)).nonzero()[0])

    def _free(self, finished: np.ndarray) -> None:
        """Release rows; the last ones move into the gaps, so that rows in work stay the first."""
        for row in finished.tolist():
            self.cache.release(row)
        left = self.count - len(finished)
        gaps = finished[finished < left]
        if len(gaps):
            in_work = np.ones(self.count, bool)
            in_work[finished] = False
            last = left + in_work[left:].nonzero()[0]
            self.cache.move(last, gaps)
            self.rows.move(last, gaps)
        self.count = left


def _gap(found_V: Tensor, own_V: Tensor) -> float:
    return ((found_V.float() - own_V).norm() / own_V.norm()).item()


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _steady(model: Any) -> bool:
    """Whether a position has the same angles in every batch. Where a rotary embedding chooses its
    frequencies by the positions it is given, it waits for the device to know them, which a capture
    cannot."""
    kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    return not any("dynamic" in kind or "longrope" in kind for kind in kinds)
