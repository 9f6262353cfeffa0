"""How much memory a step needs, told beforehand from sizes alone.

A step's peak on a device, where agents take turns (bytes; w = 2 in bfloat16, 4 in float32):

    at rest     each agent: weights w, and unless they wait on the host (policy/offload.py) the float32
                master 4 (bfloat16 only), AdamW's moments 8 and the KL term's start weights w
    rollouts    at rest + keys and values + one decode step's logits, or one prefill's hidden states
    learning    at rest + keys and values (a GPU's stay) + this agent's own of the above + the larger of
                a micro-batch (what its backward needs, a chunk of logits, the head's gradient; and the
                float32 gradients 4, but in the first micro-batch) and the optimizer's step

Sequences are taken at their longest, so a run stays below it where replies are shorter.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

from hacrl.config import AgentConfig, Config
from hacrl.policy.head import CHUNK_BYTES
from hacrl.policy.offload import is_short
from hacrl.sampling.cache import PAGE, PREFILL_TOKENS
from hacrl.study.doctor.activations import Measured, measure


@dataclass(frozen=True)
class Need:
    """An agent's memory in bytes, by what it is for.

    Example: Need(parameters=268_098_176, weights=540e6, waiting=3.2e9, gradients=1.1e9, batch=18e9,
             step=1.3e9, cache=80e6, sampling=270e6, offload="auto")
    """

    parameters: int
    weights: float
    """What samples and scores; always on the device."""
    waiting: float
    """Master, moments and start weights: may wait on the host while others learn."""
    gradients: float
    batch: float
    """A micro-batch's forward and backward, gradients in float32 included where there were some."""
    step: float
    """The optimizer's step, gradients included."""
    cache: float
    """Keys and values of all rows that are sampled side by side, at their longest."""
    sampling: float
    """A prefill or a decode step."""
    offload: str

    @property
    def learning(self) -> float:
        return max(self.batch, self.step)


@dataclass(frozen=True)
class Peak:
    """Of one device over a step.

    Example: Peak(bytes=92e9, when="qwen-4b learns", parked=True)
    """

    bytes: float
    when: str
    parked: bool
    """Whether what can wait on the host does."""


def device_peak(needs: dict[str, Need], whole: float | None, keeps_cache: bool) -> Peak:
    """Of agents that share a device of `whole` bytes (None: unknown, nobody is short of it).

    `keeps_cache`: keys and values stay while agents learn, as they do on a GPU, in one arena.
    """
    cache = max(n.cache for n in needs.values())
    kept = cache if keeps_cache else 0.0
    full = sum(n.weights + n.waiting for n in needs.values()) + kept
    short = whole is not None and is_short(full, whole)

    def rests(need: Need) -> float:
        away = need.offload == "optimizer" or (need.offload == "auto" and short)
        return need.weights + (0.0 if away else need.waiting)

    parked = any(rests(n) < n.weights + n.waiting for n in needs.values())
    moments = []
    for name, need in needs.items():
        others = sum(rests(n) for other, n in needs.items() if other != name)
        own = need.weights + need.waiting
        moments.append((others + rests(need) + cache + need.sampling, f"{name} samples"))
        if need.learning:
            moments.append((others + own + kept + need.learning, f"{name} learns"))
    most, when = max(moments)
    return Peak(most, when, parked)


def estimate_need(
    config: Config, agent: AgentConfig, source: str, device: torch.device, whole: float | None
) -> Need | None:
    """From sizes alone; None where the model's config does not tell them. `source` is a folder or a
    hub name, `whole` the device's memory."""
    half = agent.dtype == "bfloat16" or (agent.dtype == "auto" and device.type == "cuda")
    dtype = torch.bfloat16 if half else torch.float32
    sizes = measure(source, agent, dtype, on_gpu=device.type == "cuda")
    if sizes is None:
        return None
    width = 2 if half else 4
    kl = agent.learns and config.algorithm.beta > 0 and not agent.lora
    # AdamW keeps two float32 moments; a bfloat16 model a float32 master besides.
    trained = sizes.trained / agent.ranks if agent.learns else 0.0
    waiting = trained * (12 if half else 8) + (sizes.parameters * width if kl else 0)
    gradients = trained * 4
    batch = step = 0.0
    if agent.learns:
        tokens, several = _microbatch(config, agent)
        batch = _passes(agent, sizes, tokens, device, width) + (gradients if several else 0.0)
        step = gradients + 2 * 4 * (sizes.words * sizes.hidden if not agent.lora else 0)
    weights = sizes.parameters * width * (1 if agent.ranks == 1 else 1 + 1 / agent.ranks)
    return Need(
        parameters=sizes.parameters,
        weights=weights,
        waiting=waiting,
        gradients=gradients,
        batch=batch,
        step=step,
        cache=_cache(config, agent, sizes, device, whole),
        sampling=_sampling(config, agent, sizes, device, width),
        # shards stay where they are, and on a CPU there is no elsewhere
        offload="none" if agent.ranks > 1 or device.type == "cpu" else agent.offload,
    )


def _longest(config: Config, agent: AgentConfig) -> int:
    return config.prompt_limit(agent) + config.response_limit(agent)


def _microbatch(config: Config, agent: AgentConfig) -> tuple[int, bool]:
    """Tokens of the largest micro-batch, and whether an update has several."""
    most = max(config.samples_of(a) for a in config.agents) * config.prompts_per_step
    update = min(config.minibatch_samples, most * len(config.agents)) * _longest(config, agent)
    tokens = min(max(agent.microbatch_tokens, _longest(config, agent)), update)
    return tokens, tokens < update


def _passes(
    agent: AgentConfig, sizes: Measured, tokens: int, device: torch.device, width: int
) -> float:
    """Forward and backward of a micro-batch, but for the float32 gradients."""
    head = _head(agent, sizes, tokens, device, width)
    if not agent.gradient_checkpointing:
        return tokens * sizes.kept + head
    # every layer's input; then the head's backward, or what one layer keeps when computed again
    layer = tokens * sizes.kept / sizes.layers
    return tokens * sizes.layers * sizes.hidden * width + max(head, layer)


def _head(
    agent: AgentConfig, sizes: Measured, tokens: int, device: torch.device, width: int
) -> float:
    """A chunk of logits, hidden states and their gradient, and the head's own gradient."""
    element = width + (0 if device.type == "cuda" else 8)
    chunk = min(CHUNK_BYTES[device.type], tokens * sizes.words * element)
    several = tokens * sizes.words * element > chunk
    own = sizes.words * sizes.hidden * (width + (4 if several and width == 2 else 0))
    return chunk + 2 * tokens * sizes.hidden * width + (0 if agent.lora else own)


def _cache(
    config: Config, agent: AgentConfig, sizes: Measured, device: torch.device, whole: float | None
) -> float:
    if config.sampler_of(agent).kind != "builtin":
        return 0.0
    longest = _longest(config, agent)
    rows = min(agent.sampler_rows, config.prompts_per_step * config.samples_of(agent))
    tokens = rows * longest
    if device.type == "cuda":
        pages = rows * (ceil(longest / PAGE) + 1)
        pages += config.prompts_per_step * ceil(config.prompt_limit(agent) / PAGE)
        tokens = pages * PAGE
    wanted = tokens * sizes.cache_token
    return min(wanted, config.sampler.cache_fraction * whole) if whole else wanted


def _sampling(
    config: Config, agent: AgentConfig, sizes: Measured, device: torch.device, width: int
) -> float:
    """The larger of a prefill or scoring pass (a block's inner tensors) and a decode step's logits."""
    rows = min(agent.sampler_rows, config.prompts_per_step * config.samples_of(agent))
    prefill = min(PREFILL_TOKENS[device.type], config.prompts_per_step * config.prompt_limit(agent))
    tokens = max(prefill, _microbatch(config, agent)[0])
    passing = tokens * (3 * sizes.inner + 6 * sizes.hidden) * width
    return max(passing, rows * sizes.words * width)


# ---------------------------------------------------------------- files and devices


def count_parameters(folder: Path) -> int | None:
    """Of the safetensors files, read from their headers alone; None where there are none."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_count_in_file, files)) or None


def _count_in_file(path: Path) -> int:
    """A file begins with the length of its JSON header: {name: {"shape": [...], ...}, ...}."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return sum(prod(t["shape"]) for name, t in header.items() if name != "__metadata__")


def memory_of(device: torch.device) -> float | None:
    """All of a GPU's, or of this machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes: Sequence[list[str]] = [line.split() for line in lines]
    return next((float(s[1]) * 1024 for s in sizes if s[0] == "MemTotal:"), None)


def size_text(size: float) -> str:
    """e.g. 540 MB, 1.6 GB"""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
