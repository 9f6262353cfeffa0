"""The GPU engine: continuous batching over the paged KV cache.

Samples of the same prompt share one prefill. A finished row is replaced by a waiting request at once.
Decode steps run as CUDA graphs (decode.py); between two of their rounds the code here reads the new
tokens, frees finished rows and admits waiting requests.

Axis suffixes: R rows, S decode steps of a round, N new tokens.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hacrl.errors import UserError
from hacrl.policy.attention import CacheShape, Switch
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.cache import PREFILL_TOKENS, PagedCache, Prefix, device_memory, pages_for
from hacrl.sampling.decode import GraphDecoder, Rows
from hacrl.stopping import check

AHEAD = 64  # maximum number of waiting prompts that are prefilled together with an admitted one


class PagedSampler:
    """Samples up to `rows` replies at a time.

    Keys and values take at most `cache_fraction` of the device's memory. If that is too little for all
    rows, some requests wait longer.
    """

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        end_ids: Sequence[int],
        pad_id: int,
        rows: int,
        cache_fraction: float,
    ) -> None:
        self.model = model
        self.end_ids, self.pad_id, self.rows = tuple(end_ids), pad_id, rows
        self.cache_fraction = cache_fraction
        self.cache = PagedCache(shape, model.device, rows)
        self._decoder: GraphDecoder | None = None

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        with Switch(self.model).on():
            decoder = self._prepare(requests)
            decoder.set_temperature(temperature)
            return ContinuousBatch(self, decoder, requests).run()

    def _prepare(self, requests: Sequence[Request]) -> GraphDecoder:
        """Reserve pages, and make a new decoder if their addresses changed."""
        page_bytes = self.cache.page_bytes
        longest = max(len(r.prompt_ids) + r.limit for r in requests)
        width = pages_for(longest) + 1
        wanted = max(2, min(self.rows, len(requests))) * width
        wanted += sum(pages_for(len(p)) for p in {r.prompt_ids for r in requests})
        allowed = int(self.cache_fraction * device_memory(self.cache.device)) // page_bytes
        if min(wanted, allowed) < 2 * width:
            raise UserError(
                f"a sequence of {longest} tokens needs a KV cache of {width * page_bytes / 2**30:.1f} "
                f"GiB, but sampler.cache_fraction = {self.cache_fraction} of the device's memory is "
                f"{allowed * page_bytes / 2**30:.1f} GiB, too little for two sequences. Raise "
                "sampler.cache_fraction, or lower max_prompt_tokens or max_response_tokens."
            )
        changed = self.cache.reserve(min(wanted, allowed), width)
        if changed or self._decoder is None:
            self._decoder = None  # free the graphs of the old addresses first
            self._decoder = GraphDecoder(self.model, self.cache, self.end_ids, self.rows)
        return self._decoder


class ContinuousBatch:
    """One call of `sample`: assigns requests to rows and collects their tokens.

    Active rows are always the first `count` rows.
    """

    def __init__(
        self, sampler: PagedSampler, decoder: GraphDecoder, requests: Sequence[Request]
    ) -> None:
        self.requests, self.cache, self.decoder = requests, sampler.cache, decoder
        self.pad_id, self.end_ids = sampler.pad_id, np.array(sampler.end_ids, np.int64)
        self.max_rows = min(sampler.rows, len(requests))
        self.count = 0
        self.rows = Rows(self.max_rows)
        longest = max(r.limit for r in requests)
        self.ids = np.zeros((len(requests), longest), np.int64)
        self.logprobs = np.zeros((len(requests), longest), np.float32)
        self.lengths = np.zeros(len(requests), np.int64)
        self.stopped = np.zeros(len(requests), bool)
        self.waiting = deque(range(len(requests)))
        self.prefixes: dict[int, Prefix] = {i: r.prompt_ids for i, r in enumerate(requests)}
        """Prompt, and partial reply after a preemption, of each waiting request."""
        self.waiting_for = Counter(self.prefixes.values())

    def run(self) -> list[Reply]:
        while self.waiting or self.count:
            check()
            self._admit()
            self._make_room(self._steps())
            # Preemption may have removed the rows with the longest rest.
            token_RS, logprob_RS = self.decoder.run(self.rows, self.count, self._steps())
            self._record(token_RS, logprob_RS)
        return [
            Reply(tuple(ids[:n].tolist()), tuple(logprobs[:n].tolist()), bool(stopped))
            for ids, logprobs, n, stopped in zip(
                self.ids, self.logprobs, self.lengths, self.stopped, strict=True
            )
        ]

    def _steps(self) -> int:
        """Decode steps of the next round."""
        left_R = self.rows.limit[: self.count] - self.rows.index[: self.count]
        return min(self.decoder.steps, max(1, int(left_R.max())))

    def _admit(self) -> None:
        """Assign free rows to waiting requests while the cache has room, and prefill them."""
        before = self.count
        while self.waiting and self.count < self.max_rows:
            i = self.waiting[0]
            prefix, request = self.prefixes[i], self.requests[i]
            if not self.cache.admit(self.count, prefix, more=self.waiting_for[prefix] > 1):
                break
            self.waiting.popleft()
            del self.prefixes[i]
            self.waiting_for[prefix] -= 1
            rows, row = self.rows, self.count
            rows.request[row], rows.key[row], rows.limit[row] = i, request.key, request.limit
            rows.token[row], rows.position[row] = prefix[-1], len(prefix) - 1
            rows.index[row] = self.lengths[i]
            self.count += 1
        if self.count > before:
            self.cache.prepare(self._upcoming_prefixes())
            self.cache.fill(self.decoder.model, self.pad_id)

    def _upcoming_prefixes(self) -> Iterator[Prefix]:
        """Distinct prefixes of the next waiting requests, up to half of one prefill pass."""
        seen: set[Prefix] = set()
        tokens = 0
        for prefix in map(self.prefixes.__getitem__, self.waiting):
            if prefix not in seen:
                tokens += len(prefix)
                if len(seen) == AHEAD or tokens > PREFILL_TOKENS // 2:
                    return
                seen.add(prefix)
                yield prefix

    def _make_room(self, steps: int) -> None:
        """Cache space for the next steps of every row; preempt the shortest replies if there is none."""
        rows = self.rows
        while self.count:
            left_R = rows.limit[: self.count] - rows.index[: self.count]
            if self.cache.grow(rows.position[: self.count] + np.minimum(left_R, steps)):
                return
            self._preempt(int(rows.index[: self.count].argmin()))

    def _preempt(self, row: int) -> None:
        """Free the row; its request waits again and continues after the tokens sampled so far."""
        i = int(self.rows.request[row])
        prefix = (*self.requests[i].prompt_ids, *self.ids[i, : self.lengths[i]].tolist())
        self.prefixes[i] = prefix
        self.waiting_for[prefix] += 1
        self.waiting.appendleft(i)
        self._free(np.array([row]))

    def _record(self, token_RS: np.ndarray, logprob_RS: np.ndarray) -> None:
        """Store the new tokens up to each row's end, and free finished rows."""
        rows, count, steps = self.rows, self.count, token_RS.shape[1]
        request_R, index_R, limit_R = (a[:count] for a in (rows.request, rows.index, rows.limit))
        ended_RS = (token_RS[:, :, None] == self.end_ids).any(2)
        end_R = np.where(ended_RS.any(1), ended_RS.argmax(1) + 1, steps + 1)
        new_R = np.minimum(np.minimum(end_R, limit_R - index_R), steps)
        row_N, step_N = (np.arange(steps) < new_R[:, None]).nonzero()
        place = request_R[row_N], index_R[row_N] + step_N
        self.ids[place] = token_RS[row_N, step_N]
        self.logprobs[place] = logprob_RS[row_N, step_N]
        stopped_R = end_R <= new_R
        self.stopped[request_R] = stopped_R
        rows.position[:count] += new_R
        rows.token[:count] = token_RS[np.arange(count), new_R - 1]
        index_R += new_R
        self.lengths[request_R] = index_R
        self._free((stopped_R | (index_R >= limit_R)).nonzero()[0])

    def _free(self, finished: np.ndarray) -> None:
        """Release rows, and move the last active rows into the gaps."""
        for row in finished.tolist():
            self.cache.release(row)
        left = self.count - len(finished)
        gaps = finished[finished < left]
        if len(gaps):
            active = np.ones(self.count, bool)
            active[finished] = False
            last = left + active[left:].nonzero()[0]
            self.cache.move(last, gaps)
            self.rows.move(last, gaps)
        self.count = left
