"""Decode steps: the model over one new token a row, and the draw of the next.

On a CPU a step is a plain forward. On a GPU it is a captured graph: forward, draw and bookkeeping
are replayed without Python, several steps between two looks of the host, for one of a few sizes of
batch. The graph holds the addresses of the resident weights, which updates overwrite in place.

Axis suffixes: R rows, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hacrl.noise import exponential_noise
from hacrl.policy.attention import Rule, Work, doing
from hacrl.policy.fuse import Fusion
from hacrl.sampling.cache import PagedCache
from hacrl.sampling.joined import Joined
from hacrl.sampling.slots import SlotCache, SlotStep

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows of the captured steps; between two sizes the larger is replayed with idle rows."""
FUSE_AFTER = 256
"""Steps after which the small operations of a step are compiled and the step is captured anew."""
PROGRAMS = 264
"""Attention is split along a row's cache until a step has so many independent pieces of work."""


class Rows:
    """What the host knows of the rows in work, the first `count` of each array.

    Example: rows = Rows(512); rows.token[0] = 17
    """

    def __init__(self, rows: int) -> None:
        self.state = torch.zeros((len(STATE), rows), dtype=torch.int64)
        if torch.cuda.is_available():
            self.state = self.state.pin_memory()
        self.token, self.position, self.key, self.index, self.limit, _ = self.state.numpy()
        self.request = np.zeros(rows, np.int64)
        """Which request the row writes."""
        self.admitted = np.zeros(rows, np.int64)
        """Number of the row's admission; the newest give way first."""
        self.twin = np.arange(rows)
        """The first of the rows that begin to continue the same prompt in this step, else itself."""

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        for array in (*self.state.numpy(), self.request, self.admitted):
            array[targets] = array[sources]


STATE = ("token", "position", "key", "index", "limit", "done")
"""Of each row: the next token to read, where it stands in the sequence, the noise stream, the place
in the reply of the token that will be drawn, the reply's limit, and (on the device) its end."""


class Decoder(Protocol):
    ticks: int
    """Steps between two looks of the host."""

    def read(self, ids_BL: Tensor, work: Work) -> None:
        """Prompts, padded on the right; only what attention stores is wanted."""

    def run(self, rows: Rows, count: int, ticks: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their log-probabilities, [count, ticks]; what a row draws after its end is
        meaningless."""


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
        self.model(input_ids=ids_BL, use_cache=False, logits_to_keep=1)


def next_logits(model: Any, token_R: Tensor, position_R: Tensor) -> Tensor:
    """[R, V] after one more token a row."""
    return model(
        input_ids=token_R.unsqueeze(1),
        position_ids=position_R.unsqueeze(1),
        use_cache=False,
        logits_to_keep=1,
    ).logits[:, -1]


@torch.inference_mode()
def draw(
    logits_RV: Tensor, key_R: Tensor, index_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability at the temperature: the word whose exponential noise
    over its probability is least (Gumbel-max without the logarithms)."""
    logits_RV = logits_RV.float()
    if temperature not in (0, 1):
        logits_RV = logits_RV / temperature
    probs_RV = logits_RV.softmax(1)
    race_RV = logits_RV
    if temperature:
        noise_RV = exponential_noise(key_R, index_R, logits_RV.shape[1])
        race_RV = torch.div(probs_RV, noise_RV, out=noise_RV)
    token_R1 = _argmax(race_RV).unsqueeze(1)
    return token_R1.squeeze(1), probs_RV.gather(1, token_R1).squeeze(1).log()


def _argmax(scores_RV: Tensor) -> Tensor:
    """Of each row; numpy's takes a seventh of the time of torch's on a CPU."""
    if scores_RV.device.type == "cpu":
        return torch.from_numpy(scores_RV.numpy().argmax(1))
    return scores_RV.argmax(1)


class HostDecoder:
    """A step is a forward; the host looks after every one."""

    ticks = 1

    def __init__(self, passes: Passes, cache: SlotCache, temperature: float) -> None:
        self.passes, self.cache, self.temperature = passes, cache, temperature

    def read(self, ids_BL: Tensor, work: Work) -> None:
        with doing(work):
            self.passes.fill(ids_BL)

    def run(self, rows: Rows, count: int, ticks: int) -> tuple[np.ndarray, np.ndarray]:
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


def page_kernels() -> tuple[Any, Any]:
    """Attention over pages, and draw-and-advance; imported where there is a GPU (Triton)."""
    from hacrl.sampling.kernels import decode_attention, draw_and_advance

    return decode_attention, draw_and_advance


class _PageStep:
    """One new token a row over its pages."""

    def __init__(self, pages: Tensor, table_RP: Tensor, position_R: Tensor) -> None:
        self.attention = page_kernels()[0]
        self.pages, self.table_RP, self.position_R = pages, table_RP, position_R
        self.splits = 1
        while self.splits < 8 and len(position_R) * pages.shape[3] * self.splits < PROGRAMS:
            self.splits *= 2

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        out_RHD = self.attention(
            query[:, :, 0],
            key[:, :, 0],
            value[:, :, 0],
            self.pages[layer, 0],
            self.pages[layer, 1],
            self.table_RP,
            self.position_R,
            scale=rule.scale,
            window=rule.window,
            cap=rule.cap,
            splits=self.splits,
        )
        return out_RHD.unsqueeze(1)


class DeviceDecoder:
    """Captured steps over static tensors. `capture=False` runs the same step uncaptured."""

    ticks = 16

    def __init__(
        self, model: Any, cache: PagedCache, end_ids: Sequence[int], rows: int, capture: bool
    ) -> None:
        self.model, self.cache, self.capture = model, cache, capture
        self.end_ids, self.capacity = tuple(end_ids), rows
        device = cache.device
        self.state = torch.zeros((len(STATE), rows), dtype=torch.int64, device=device)
        self.settings = torch.ones(2, device=device)
        self.ends = torch.tensor(list(end_ids), dtype=torch.int32, device=device)
        self.tick = torch.zeros(1, dtype=torch.int32, device=device)
        self.out_token = torch.zeros((rows, self.ticks), dtype=torch.int32, device=device)
        self.out_logprob = torch.zeros((rows, self.ticks), device=device)
        self.table = torch.zeros(cache.table.shape, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.fusion = Fusion(model)
        if capture:
            self.joined = Joined(model)  # moves weights: before any graph holds their addresses
        self.made = 0
        """Steps so far; compiling pays after a while."""
        self._memory: Any = None

    def set_temperature(self, temperature: float) -> None:
        self.settings.copy_(torch.tensor([1 / (temperature or 1.0), float(temperature > 0)]))

    def read(self, ids_BL: Tensor, work: Work) -> None:
        with doing(work):
            LibraryForward(self.model).fill(ids_BL)

    def run(self, rows: Rows, count: int, ticks: int) -> tuple[np.ndarray, np.ndarray]:
        size = min(next((s for s in SIZES if s >= count), self.capacity), self.capacity)
        self._upload(rows, count, size)
        for _ in range(ticks):
            self._step(size)
        token = self.out_token[:count, :ticks].cpu().numpy()
        logprob = self.out_logprob[:count, :ticks].cpu().numpy()
        return token, logprob

    def _upload(self, rows: Rows, count: int, size: int) -> None:
        self.state[:, :count].copy_(rows.state[:, :count])
        self.state[:, count:size] = 0
        self.state[-1, count:size] = 1  # idle rows: done, and at the start of nobody's page
        self.table[:size].copy_(torch.from_numpy(self.cache.table[:size]))
        self.tick.zero_()

    def _step(self, size: int) -> None:
        if not self.capture:
            self._decode(size)
            return
        fused = self.made >= FUSE_AFTER
        if (size, fused) not in self.graphs:
            with self.joined.on(), self.fusion.on() if fused else nullcontext():
                self.graphs[size, fused] = self._captured(size)
            if fused:
                self.graphs.pop((size, False), None)
        self.graphs[size, fused].replay()
        self.made += 1

    def _decode(self, size: int) -> None:
        rows = dict(zip(STATE, self.state[:, :size], strict=True))
        assert self.cache.pages is not None
        work: Work = _PageStep(self.cache.pages, self.table[:size], rows["position"])
        with doing(work):
            logits_RV = next_logits(self.model, rows["token"], rows["position"])
        page_kernels()[1](
            logits_RV, rows, self.settings, self.ends, self.tick, self.out_token, self.out_logprob
        )
        self.tick.add_(1)

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self.cache.device)
        stream.wait_stream(torch.cuda.current_stream(self.cache.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._try_out(size)
        torch.cuda.current_stream(self.cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            self._decode(size)
        self._memory = self._memory or graph.pool()
        return graph

    def _try_out(self, size: int) -> None:
        """A step to warm up, of which nothing stays: rows and tick are put back, and what it wrote
        down stands where the step itself will write."""
        before, tick = self.state.clone(), self.tick.clone()
        self._decode(size)
        self.state.copy_(before)
        self.tick.copy_(tick)
