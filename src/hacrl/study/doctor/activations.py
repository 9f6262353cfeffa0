"""Measure the activations that a forward pass keeps for the backward, on a model without weights.

The model is built from its config on torch's meta device, where tensors have shapes but no memory.
Hooks count what autograd saves per token. This works for every architecture that transformers can
build, without loading weights.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hacrl.config import AgentConfig
from hacrl.importing import remote_code
from hacrl.policy.attention import Rule, Switch, doing
from hacrl.policy.fuse import ROTARY, WORTH_COMPILING, LearningFusion

TOKENS = 64


@dataclass(frozen=True)
class Measured:
    """Sizes of one model.

    Example: Measured(parameters=1.7e9, trained=1.7e9, kept=1.9e6, layers=28, hidden=2048,
             inner=6144, words=151936, cache_token=114688)
    """

    parameters: int
    trained: int  # trainable parameters: those above, or the adapter's
    kept: float  # bytes saved for the backward per token, over all layers
    layers: int
    hidden: int
    inner: int  # largest output size of a linear layer inside a block
    words: int
    cache_token: int  # bytes of keys and values per token


def measure(
    source: str, agent: AgentConfig, dtype: torch.dtype, *, on_gpu: bool = False
) -> Measured | None:
    """Measure a model. None if it cannot be built from its config, or if its attention cannot be
    replaced."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hacrl.policy.lora import add_adapter

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code(agent))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=remote_code(agent),
            ).eval()
            if agent.lora:
                model = add_adapter(model, agent.lora).to(dtype)
            parameters = sum(p.numel() for p in model.parameters())
            fused = on_gpu and dtype.itemsize == 2 and parameters >= WORTH_COMPILING
            return _measure(model, dtype, fused and agent.ranks == 1)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError):
        return None


def _measure(model: Any, dtype: torch.dtype, fused: bool) -> Measured | None:
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"  # other types read positions, which have no values here
    weighing = _Weighing()
    kept: dict[int, Tensor] = {}
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.zeros((1, TOKENS), dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Switch(model).on(),
        doing(weighing),
        LearningFusion(model, _keeping).on() if fused else nullcontext(),
    ):
        hidden_1ND = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not weighing.layers:
        return None
    head = model.get_output_embeddings()
    linears = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    return Measured(
        parameters=sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        kept=sum(t.untyped_storage().nbytes() for t in kept.values()) / TOKENS,
        layers=len(weighing.layers),
        hidden=hidden_1ND.shape[-1],
        inner=max((m.out_features for m in linears), default=4 * hidden_1ND.shape[-1]),
        words=head.weight.shape[0],
        cache_token=sum(weighing.layers.values()) * dtype.itemsize,
    )


class _Weighing:
    """Attention that computes nothing but saves what the real one saves for its backward."""

    def __init__(self) -> None:
        self.layers: dict[int, int] = {}  # layer -> number of elements of a token's keys and values

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.layers[layer] = (key.numel() + value.numel()) // TOKENS
        out: Tensor = _Kept.apply(query, key, value)
        return out


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function saves its inputs; a rotary embedding only its angles."""
    kept = slice(2, None) if getattr(function, "__name__", "") == ROTARY else slice(None)

    def call(*arguments: Any, **named: Any) -> Any:
        return _Inputs.apply(partial(function, **named), kept, *arguments)

    return call


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], kept: slice, *arguments: Any) -> Any:
        ctx.save_for_backward(*(a for a in arguments[kept] if isinstance(a, Tensor)))
        return function(*arguments)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_1HND: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, heads, tokens, _ = query_1HND.shape
        out_1NHD = query_1HND.new_empty((1, tokens, heads, value.shape[-1]))
        lse_HN = torch.empty((heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(query_1HND, key, value, out_1NHD, lse_HN)
        return out_1NHD
