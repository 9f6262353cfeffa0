"""How many parameters a model folder has, and about how much memory an agent needs."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hacrl.config import AgentConfig, Config


@dataclass(frozen=True)
class Need:
    """An agent's memory in bytes, by what it is for.

    Example: Need(weights=540e6, training=1.6e9, cache=80e6)
    """

    weights: float
    """What samples and scores."""
    training: float
    """Gradients, optimizer, float32 master, and the start weights where the KL term keeps them."""
    cache: float
    """Keys and values of all rows that are sampled side by side, at their longest."""

    @property
    def total(self) -> float:
        """Activations of a micro-batch come on top; they grow with microbatch_tokens."""
        return self.weights + self.training + self.cache


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


def estimate_need(config: Config, agent: AgentConfig, folder: Path, on_gpu: bool) -> Need | None:
    """An estimate from sizes alone; None where the folder does not tell them."""
    parameters = count_parameters(folder)
    shape = _shape(folder)
    if parameters is None or shape is None:
        return None
    half = agent.dtype == "bfloat16" or (agent.dtype == "auto" and on_gpu)
    width = 2 if half else 4
    trained = _adapter_size(agent, shape) if agent.lora else parameters
    # AdamW keeps two float32 moments; a bfloat16 model a float32 master and its gradient besides.
    for_one = width + 8 + (8 if half else 0)
    training = trained * for_one if agent.learns else 0
    if agent.learns and config.algorithm.beta > 0 and not agent.lora:
        training += parameters * width
    rows = min(agent.sampler_rows, config.prompts_per_step * config.samples_of(agent))
    length = config.prompt_limit(agent) + config.response_limit(agent)
    cache = 2 * shape.layers * shape.kv_width * rows * length * width
    return Need(parameters * width, training, cache)


@dataclass(frozen=True)
class _Shape:
    layers: int
    hidden: int
    kv_width: int
    """Keys (or values) of one token in one layer."""


def _shape(folder: Path) -> _Shape | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        return _Shape(layers, hidden, (config.get("num_key_value_heads") or heads) * head)
    except (OSError, ValueError, KeyError):
        return None  # an architecture that names its sizes otherwise


def _adapter_size(agent: AgentConfig, shape: _Shape) -> float:
    """About seven linear layers a block, each with two thin matrices."""
    assert agent.lora is not None
    return shape.layers * 7 * agent.lora.rank * 4 * shape.hidden


def size_text(size: float) -> str:
    """e.g. 540 MB, 1.6 GB"""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
