"""Decode steps of the GPU engine: forward, draw and bookkeeping as one CUDA graph.

A round replays several steps before the host reads their tokens. There is one graph for each of a few
batch sizes. Graphs hold the addresses of the trainer's weights, which updates overwrite in place.

Axis suffixes: R rows, V words, P pages.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hacrl.policy.attention import Rule, Work, doing
from hacrl.policy.fuse import Fusion
from hacrl.sampling.cache import PagedCache
from hacrl.sampling.joined import Joined

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows of the captured steps. A batch uses the next larger size; the remaining rows are idle."""
FUSE_AFTER = 256
"""Steps after which small operations are compiled (policy/fuse.py) and graphs are captured again."""
PROGRAMS = 264
"""Attention over a row is split until a layer's attention has this many independent programs."""
STATE = ("token", "position", "key", "index", "limit", "done")
"""State of a row: the next token to read, its position in the sequence, the noise stream, the number of
sampled tokens, the reply's limit, and (on the device) whether the reply is finished."""


class Rows:
    """Host copy of the state of all rows; active rows come first.

    Example: rows = Rows(512); rows.token[0] = 17
    """

    def __init__(self, rows: int) -> None:
        self.state = torch.zeros((len(STATE), rows), dtype=torch.int64)
        if torch.cuda.is_available():
            self.state = self.state.pin_memory()
        self.token, self.position, self.key, self.index, self.limit, _ = self.state.numpy()
        self.request = np.zeros(rows, np.int64)  # number of the row's request

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        for array in (*self.state.numpy(), self.request):
            array[targets] = array[sources]


def next_logits(model: Any, token_R: Tensor, position_R: Tensor, work: Work) -> Tensor:
    """Logits [R, V] after one more token in every row; `work` attends and stores keys and values."""
    ids_R1, position_R1 = token_R.unsqueeze(1), position_R.unsqueeze(1)
    with doing(work):
        output = model(
            input_ids=ids_R1, position_ids=position_R1, use_cache=False, logits_to_keep=1
        )
    logits_RV: Tensor = output.logits[:, -1]
    return logits_RV


def page_kernels() -> tuple[Any, Any]:
    """Paged attention and the draw. Imported here because Triton needs a GPU."""
    from hacrl.sampling.kernels import decode_attention, draw_and_advance

    return decode_attention, draw_and_advance


class _DecodeAttention:
    """Attention of one new token per row over the row's pages."""

    def __init__(self, pages: Tensor, table_RP: Tensor, position_R: Tensor) -> None:
        self.attention = page_kernels()[0]
        self.pages, self.table_RP, self.position_R = pages, table_RP, position_R
        self.splits = 1
        while self.splits < 8 and len(position_R) * pages.shape[3] * self.splits < PROGRAMS:
            self.splits *= 2

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        query, key, value = (x[:, :, 0] for x in (query, key, value))
        keys, values = self.pages[layer, 0], self.pages[layer, 1]
        table, position = self.table_RP, self.position_R
        out_RHD: Tensor = self.attention(
            query, key, value, keys, values, table, position, rule, self.splits
        )
        return out_RHD.unsqueeze(1)


class GraphDecoder:
    """Decode steps over static tensors, captured as CUDA graphs if the model allows it."""

    steps = 16  # maximum number of steps in a round

    def __init__(self, model: Any, cache: PagedCache, end_ids: Sequence[int], rows: int) -> None:
        self.model, self.cache, self.capacity = model, cache, rows
        device = cache.device
        self.capture = device.type == "cuda" and has_static_rope(model)
        self.state = torch.zeros((len(STATE), rows), dtype=torch.int64, device=device)
        self.settings = torch.ones(2, device=device)
        """1 / temperature, and 1 for sampling or 0 for greedy."""
        self.ends = torch.tensor(list(end_ids), dtype=torch.int32, device=device)
        self.tick = torch.zeros(1, dtype=torch.int32, device=device)
        """Number of the step in its round."""
        self.out_token = torch.zeros((rows, self.steps), dtype=torch.int32, device=device)
        self.out_logprob = torch.zeros((rows, self.steps), device=device)
        self.table = torch.zeros(cache.table.shape, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.fusion = Fusion(model)
        if self.capture:
            self.joined = Joined(model)  # moves weights, so before any graph holds their addresses
            # One for all graphs: freed memory and workspaces of cuBLAS serve only their own stream.
            self.stream = torch.cuda.Stream(device)
        self.steps_done = 0
        self._memory: Any = None

    def set_temperature(self, temperature: float) -> None:
        self.settings.copy_(torch.tensor([1 / (temperature or 1.0), float(temperature > 0)]))

    def run(self, rows: Rows, count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities [count, steps]. Values after a row's end are undefined."""
        size = min(next((s for s in SIZES if s >= count), self.capacity), self.capacity)
        self.state[:, :count].copy_(rows.state[:, :count])
        self.state[:, count:size] = 0
        self.state[-1, count:size] = 1  # idle rows: done, position 0 of page 0
        self.table[:size].copy_(torch.from_numpy(self.cache.table[:size]))
        self.tick.zero_()
        with torch.cuda.device_of(self.state):  # Triton launches on the current GPU
            for _ in range(steps):
                self._step(size)
        token = self.out_token[:count, :steps].cpu().numpy()
        logprob = self.out_logprob[:count, :steps].cpu().numpy()
        return token, logprob

    def _step(self, size: int) -> None:
        if not self.capture:
            self._decode(size)
            return
        fused = self.steps_done >= FUSE_AFTER
        if (size, fused) not in self.graphs:
            with self.joined.on(), self.fusion.on() if fused else nullcontext():
                self.graphs[size, fused] = self._captured(size)
            if fused:
                self.graphs.pop((size, False), None)
        self.graphs[size, fused].replay()
        self.steps_done += 1

    def _decode(self, size: int) -> None:
        rows = dict(zip(STATE, self.state[:, :size], strict=True))
        work = _DecodeAttention(self.cache.pages, self.table[:size], rows["position"])
        logits_RV = next_logits(self.model, rows["token"], rows["position"], work)
        page_kernels()[1](
            logits_RV, rows, self.settings, self.ends, self.tick, self.out_token, self.out_logprob
        )
        self.tick.add_(1)

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        current = torch.cuda.current_stream(self.cache.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self._warm_up(size)
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self.stream):
            self._decode(size)
        self._memory = self._memory or graph.pool()
        return graph

    def _warm_up(self, size: int) -> None:
        """Run a step and restore the state. Its cache entries and outputs are overwritten by the step
        itself, because a capture can come between any two steps of a round."""
        state, tick = self.state.clone(), self.tick.clone()
        self._decode(size)
        self.state.copy_(state)
        self.tick.copy_(tick)


def has_static_rope(model: Any) -> bool:
    """Whether rotary angles depend only on the position. Dynamic variants choose their frequencies by
    the longest position in the batch, which needs the host and cannot be captured."""
    kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    return not any("dynamic" in kind or "longrope" in kind for kind in kinds)
