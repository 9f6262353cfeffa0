"""Estimate the peak memory of a training step from the sizes of the models.

The peak on a device where agents take turns (bytes per parameter; w = 2 in bfloat16, 4 in float32):

    between updates  every agent: weights w and, unless offloaded (policy/offload.py), float32 master
                     weights 4 (bfloat16 only), AdamW moments 8 and start weights of the KL term w
    rollouts         the above + KV cache + the logits of a decode step, or a prefill's hidden states
    learning         the above + KV cache (it stays on a GPU) + this agent's optimizer state + the
                     larger of a micro-batch (activations, a chunk of logits, the head's gradient, and
                     float32 gradients 4 after the first micro-batch) and the optimizer step

Sequences have their maximum length, so a run with shorter replies needs less.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from hacrl.config import AgentConfig, Config
from hacrl.importing import remote_code
from hacrl.policy.fast_paths import caps_logits
from hacrl.policy.fuse import WORTH_COMPILING
from hacrl.policy.head import CHUNK_BYTES
from hacrl.policy.offload import is_short
from hacrl.sampling.cache import PAGE, PREFILL_TOKENS


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model.

    Example: Sizes(parameters=1.7e9, trained=1.7e9, kept=1.9e6, layers=28, hidden=2048, inner=6144,
             words=151936, cache_token=114688, full_logits=False,
             underestimated="")
    """

    parameters: int
    trained: int  # trainable parameters: those above, or the adapter's
    kept: float  # bytes saved for the backward per token, over all layers
    layers: int
    hidden: int
    inner: int
    words: int
    cache_token: int  # bytes of keys and values per token
    full_logits: bool  # whether an update holds the logits of all tokens (policy/fast_paths.py)
    underestimated: str  # parts of the model for which `kept` may be too low; empty for most models


def measure(source: str, agent: AgentConfig, dtype: torch.dtype, on_gpu: bool) -> Sizes | None:
    """The sizes of a model, which is built from its config without weights; None if it cannot be built.

    For the backward a layer with a gated MLP saves inputs and outputs of its norms, queries, keys,
    values, the output of the attention, gate, up and their product. Where norms and activations are not
    compiled into one operation (policy/fuse.py), it also saves the activated gate and copies in norms.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from hacrl.policy.lora import add_adapter

    try:
        remote = remote_code(agent)
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote)
            model = add_adapter(model, agent.lora) if agent.lora else model
        text = config.get_text_config()
        hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        inner = max(inner) if isinstance(inner, list) else inner  # Gemma 3n: one size per layer
        if experts := getattr(text, "num_experts_per_tok", None):
            inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
        width = getattr(text, "head_dim", None) or hidden // heads
        query, keys = width * heads, width * (getattr(text, "num_key_value_heads", None) or heads)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError):
        return None
    named = dict(model.named_parameters())
    norms = [p.numel() for name, p in named.items() if p.ndim == 1 and name.endswith("norm.weight")]
    wide = norms.count(hidden) / layers * hidden
    narrow = query + keys if len(norms) > norms.count(hidden) else 0  # norms of queries and keys
    kept = 3 * inner + 2 * query + 2 * keys + 2 * wide + narrow
    parameters = sum(p.numel() for name, p in named.items() if "lora_" not in name)
    half = dtype.itemsize == 2
    if not (on_gpu and half and parameters >= WORTH_COMPILING and agent.ranks == 1):
        kept += inner + (half + (not agent.lora)) * (wide + narrow)
    return Sizes(
        parameters=parameters,
        trained=sum(p.numel() for p in named.values() if p.requires_grad),
        kept=kept * layers * dtype.itemsize,
        layers=layers,
        hidden=hidden,
        inner=inner,
        words=model.get_output_embeddings().weight.shape[0],
        cache_token=2 * keys * layers * dtype.itemsize,
        full_logits=caps_logits(config),
        underestimated=", ".join(_underestimated(text, agent)),
    )


def _underestimated(text: Any, agent: AgentConfig) -> Iterator[str]:
    """Parts of the model for which an update holds more than the tensors that `measure` counts."""
    if getattr(text, "kv_lora_rank", None):
        yield "latent attention"
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        yield "linear attention"
    if agent.attention != "sdpa":
        yield f"attention = {agent.attention!r}"


@dataclass(frozen=True)
class Need:
    """Memory of one agent in bytes.

    Example: Need(parameters=268_098_176, weights=540e6, offloadable=3.2e9, learning=18e9,
             cache=80e6, sampling=270e6, offload="auto")
    """

    parameters: int
    weights: float  # weights for sampling and scoring; always on the device
    offloadable: float
    """Master weights, moments and start weights; can be on the host while other agents learn."""
    learning: float
    """A micro-batch with the gradients of earlier ones, or the optimizer step; 0 if it is frozen."""
    cache: float  # KV cache of all rows that are sampled at the same time, at maximum length
    sampling: float  # a prefill or a decode step
    offload: str
    underestimated: str = ""  # parts of the model for which `learning` may be too low


@dataclass(frozen=True)
class Peak:
    """Peak memory of one device in a step.

    Example: Peak(bytes=92e9, when="qwen-4b learns", offloaded=True)
    """

    bytes: float
    when: str
    offloaded: bool  # whether some agent's optimizer state is offloaded to the host


def device_peak(needs: dict[str, Need], whole: float | None, keeps_cache: bool) -> Peak:
    """The peak of agents that share a device of `whole` bytes (None: unknown, large enough).

    keeps_cache: the KV cache stays allocated while agents learn, as on a GPU.
    """
    cache = max(n.cache for n in needs.values())
    kept = cache if keeps_cache else 0.0
    full = sum(n.weights + n.offloadable for n in needs.values()) + kept
    short = whole is not None and is_short(full, whole)

    def resident(need: Need) -> float:
        away = need.offload == "optimizer" or (need.offload == "auto" and short)
        return need.weights + (0.0 if away else need.offloadable)

    total = sum(map(resident, needs.values()))
    moments = []
    for name, need in needs.items():
        moments.append((total + cache + need.sampling, f"{name} samples"))
        if need.learning:
            own = need.weights + need.offloadable
            moments.append((total - resident(need) + own + kept + need.learning, f"{name} learns"))
    most, when = max(moments)
    return Peak(most, when, offloaded=total + kept < full)


def side_by_side_peak(needs: dict[str, Need], whole: float | None, keeps_cache: bool) -> Peak:
    """The peak of agents in separate processes on one device: all may have their peaks at the same time.

    Each process decides about offloading as if it were alone."""
    peaks = [device_peak({name: need}, whole, keeps_cache) for name, need in needs.items()]
    most = sum(peak.bytes for peak in peaks)
    return Peak(most, "all agents have their peaks at once", any(p.offloaded for p in peaks))


def estimate_need(
    config: Config, agent: AgentConfig, source: str, device: torch.device, whole: float | None
) -> Need | None:
    """Estimate the memory of an agent on a device of `whole` bytes. None if the model cannot be built
    from its config. `source` is a model folder or a hub name."""
    on_gpu = device.type == "cuda"
    half = agent.dtype == "bfloat16" or (agent.dtype == "auto" and on_gpu)
    sizes = measure(source, agent, torch.bfloat16 if half else torch.float32, on_gpu)
    if sizes is None:
        return None
    width = 2 if half else 4
    kl = agent.learns and config.algorithm.beta > 0 and not agent.lora
    # AdamW keeps two float32 moments; a bfloat16 model also has float32 master weights.
    trained = sizes.trained / agent.ranks if agent.learns else 0.0
    # Tokens of the largest micro-batch and of an update, with sequences of maximum length.
    longest = config.prompt_limit(agent) + config.response_limit(agent)
    most = max(config.samples_of(a) for a in config.agents) * config.prompts_per_step
    update = min(config.minibatch_samples, most * len(config.agents)) * longest
    tokens = min(max(agent.microbatch_tokens, longest), update)
    learning = 0.0
    if agent.learns:
        gradients = trained * 4
        batch = _passes(agent, sizes, tokens, device, width) + (gradients if tokens < update else 0)
        step = gradients + 2 * 4 * (sizes.words * sizes.hidden if not agent.lora else 0)
        learning = max(batch, step)
    # Sampling: a prefill or scoring pass, or the logits of a decode step.
    calls = _sampler_calls(config, agent)
    rows = max(min(agent.sampler_rows, problems * samples) for problems, samples, _ in calls)
    prefill = min(PREFILL_TOKENS, config.prompts_per_step * config.prompt_limit(agent))
    passing = max(prefill, tokens) * (3 * sizes.inner + 6 * sizes.hidden) * width
    cache = _cache_tokens(config, agent, on_gpu) * sizes.cache_token
    return Need(
        parameters=sizes.parameters,
        weights=sizes.parameters * width * (1 if agent.ranks == 1 else 1 + 1 / agent.ranks),
        offloadable=trained * (12 if half else 8) + (sizes.parameters * width if kl else 0),
        learning=learning,
        cache=min(cache, config.sampler.cache_fraction * whole) if whole else cache,
        sampling=max(passing, rows * sizes.words * width),
        # Shards are never offloaded, and on a CPU there is nowhere to offload to.
        offload="none" if agent.ranks > 1 or not on_gpu else agent.offload,
        underestimated=sizes.underestimated,
    )


def _passes(
    agent: AgentConfig, sizes: Sizes, tokens: int, device: torch.device, width: int
) -> float:
    """Forward and backward of a micro-batch, without float32 gradients."""
    element = width + (0 if device.type == "cuda" else 8)
    chunk = min(CHUNK_BYTES[device.type], tokens * sizes.words * element)
    several = tokens * sizes.words * element > chunk
    if sizes.full_logits:  # their cap, and of each scored token four float32 copies
        chunk = tokens * sizes.words * (width + 16)
    gradient = sizes.words * sizes.hidden * (width + (4 if several and width == 2 else 0))
    # A chunk of logits, hidden states with their gradient, and the gradient of the head.
    head = chunk + 2 * tokens * sizes.hidden * width + (0 if agent.lora else gradient)
    if not agent.gradient_checkpointing:
        return tokens * sizes.kept + head
    # The input of every layer, then the head's backward or the recomputation of one layer.
    layer = tokens * sizes.kept / sizes.layers
    return tokens * sizes.layers * sizes.hidden * width + max(head, layer)


def _sampler_calls(config: Config, agent: AgentConfig) -> list[tuple[int, int, int]]:
    """(problems, samples of each, token limit of a reply) of a step's rollouts and of an evaluation."""
    reply, evaluation = config.response_limit(agent), config.evaluation
    calls = [(config.prompts_per_step, config.samples_of(agent), reply)]
    if evaluation.problems:
        problems = agent.sampler_rows if evaluation.most is None else evaluation.most
        calls.append((problems, evaluation.samples, evaluation.max_response_tokens or reply))
    return calls


def _cache_tokens(config: Config, agent: AgentConfig, on_gpu: bool) -> int:
    """Tokens in the KV cache of the built-in sampler; a GPU allocates whole pages."""
    if config.sampler_of(agent).kind != "builtin":
        return 0
    prompt, most = config.prompt_limit(agent), 0
    for problems, samples, reply in _sampler_calls(config, agent):
        rows = min(agent.sampler_rows, problems * samples)
        tokens = rows * (prompt + reply)
        if on_gpu:
            pages = rows * (ceil((prompt + reply) / PAGE) + 1)
            tokens = (pages + problems * ceil(prompt / PAGE)) * PAGE
        most = max(most, tokens)
    return most


def named_parameters(model: str) -> float | None:
    """The number of parameters in a model's name; None if it names none.

    Example: named_parameters("Qwen/Qwen3-1.7B-Base") == 1.7e9
    """
    found = re.findall(r"(?<![\d.])(\d+(?:\.\d+)?)([mMbB])(?![A-Za-z])", model)
    return float(found[-1][0]) * {"m": 1e6, "b": 1e9}[found[-1][1].lower()] if found else None


def size_text(size: float) -> str:
    """e.g. 540 MB, 1.6 GB"""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
