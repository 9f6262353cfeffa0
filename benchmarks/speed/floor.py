"""The least time a trace can take on a device: bytes over bandwidth, operations over rate.

Both ceilings are measured on the device at the start of a run: a large copy (bytes read and bytes
written) and a large matrix product in the dtype of the weights.

    decode    each step reads the weights once and every live row's keys and values once; the number
              of steps is the least that the rows can do it in
    prefill   2 operations a weight and token, each prompt once, and its causal attention
    score     the same over prompts, each once, and replies, the head over reply tokens only
    update    three times a score
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speed.workload import Trace


@dataclass(frozen=True)
class Ceilings:
    """What the device can do. Example: Ceilings(bytes_per_s=4.3e12, operations_per_s=7.4e14)"""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Cost:
    """What a model's work is made of. Example of Qwen3-1.7B: body 1.41e9, head 3.1e8 weights."""

    body: int
    """Weights that every token is multiplied with, the head aside."""
    head: int
    width: int
    """Query heads x head size."""
    layers: int
    cache_bytes: int
    """Of one token's keys and values in all layers."""
    weight_bytes: int
    """Read by one decode step."""


def cost_of(model: Any) -> Cost:
    config = model.config
    item = next(model.parameters()).element_size()
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    total = sum(p.numel() for p in model.parameters())  # a tied head is counted once
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    body = total - embedding - (0 if tied else head)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return Cost(
        body=body,
        head=head,
        width=config.num_attention_heads * head_size,
        layers=config.num_hidden_layers,
        cache_bytes=2 * config.num_key_value_heads * head_size * config.num_hidden_layers * item,
        weight_bytes=(body + head) * item,
    )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    return Ceilings(_copied_bytes(device), _matrix_operations(device, dtype))


def _copied_bytes(device: torch.device) -> float:
    size = (1 << 31) if device.type == "cuda" else (1 << 26)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _matrix_operations(device: torch.device, dtype: torch.dtype) -> float:
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _best(lambda: a @ b, device)


def _best(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The fastest of several: a ceiling is what the device can do."""
    seconds = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rollout_floor(cost: Cost, trace: Trace, rows: int, ceilings: Ceilings) -> float:
    """Seconds; `rows` is how many replies may be written side by side."""
    lengths = [n for _, n in trace.rows]
    # the first token of a reply comes out of the prefill
    steps = max(max(lengths) - 1, -(-sum(n - 1 for n in lengths) // rows))
    contexts = sum(n_steps * len(p) + n_steps * (n_steps + 1) // 2 for p, n_steps in _steps(trace))
    decode = steps * cost.weight_bytes + contexts * cost.cache_bytes
    prefill = forward_operations(cost, [len(p) for p in trace.prompts], len(trace.prompts))
    return decode / ceilings.bytes_per_s + prefill / ceilings.operations_per_s


def _steps(trace: Trace) -> list[tuple[tuple[int, ...], int]]:
    return [(p, n - 1) for p, n in trace.rows]


def forward_operations(
    cost: Cost, lengths: Sequence[int], head_tokens: int, before: Sequence[int] | None = None
) -> float:
    """Multiplications and additions of one forward over sequences of these lengths, each of which
    follows this many tokens that are not processed again."""
    seen = zip(lengths, before or [0] * len(lengths), strict=True)
    attention = sum(2 * cost.layers * cost.width * n * (n + 2 * b) for n, b in seen)
    return 2.0 * cost.body * sum(lengths) + 2.0 * cost.head * head_tokens + attention


def score_floor(cost: Cost, trace: Trace, ceilings: Ceilings) -> float:
    prompts = forward_operations(cost, [len(p) for p in trace.prompts], 0)
    replies, before = [n for _, n in trace.rows], [len(p) for p, _ in trace.rows]
    replies_too = forward_operations(cost, replies, trace.reply_tokens, before)
    return (prompts + replies_too) / ceilings.operations_per_s


def update_floor(cost: Cost, trace: Trace, ceilings: Ceilings) -> float:
    return 3 * score_floor(cost, trace, ceilings)
