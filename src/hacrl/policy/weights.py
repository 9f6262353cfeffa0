"""A model placed on one device for scoring and training.

On a GPU the model is bfloat16 and the optimizer steps a float32 master copy, because a step of 1e-6
vanishes in bfloat16. After every update the master overwrites the model's tensors in place, so the
sampler, which holds the same tensors, needs no sync. In float32 the model is its own master.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacrl.config import AgentConfig
from hacrl.policy.batch import Inputs
from hacrl.policy.load import choose_dtype, move_model
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.lora import adapter_off
from hacrl.policy.packing import attending_again


@dataclass(frozen=True)
class Weights:
    """What a policy trains and scores with."""

    network: Any  # the module that takes gradients: the model itself, or its shards (sharding/)
    master: dict[str, Tensor]
    """The float32 parameters that the optimizer steps; empty for an agent that does not learn."""
    logprobs: LogProbs
    start_logprobs: Callable[[Inputs], Tensor] | None = None
    """Log-probabilities at the start weights, for the KL term; None where the loss has none."""
    start_model: Any = None  # the frozen copy of the start weights, if there is one


def move_to_device(model: Any, agent: AgentConfig, device: torch.device) -> dict[str, Tensor]:
    """Move the model in place; returns the float32 master of what is trained."""
    dtype = choose_dtype(agent.dtype, device)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and agent.learns}
    if dtype == torch.float32:
        model.to(device)
        return trained
    master = {
        n: p.detach().to(device, torch.float32, copy=True).requires_grad_()
        for n, p in trained.items()
    }
    move_model(model, device, dtype)
    return master


def enable_checkpointing(network: Any) -> None:
    """Recompute activations in the backward; attention and fused parts work as in the first forward."""
    network.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": attending_again})


def without_adapter(model: Any, logprobs: LogProbs) -> Callable[[Inputs], Tensor]:
    """Log-probabilities with the adapters of `model` switched off: its start weights."""

    def score(inputs: Inputs) -> Tensor:
        with adapter_off(model):
            return logprobs(inputs)

    return score


def accumulate_in_master(model: Any, master: dict[str, Tensor]) -> None:
    """Add each bfloat16 gradient to the master's float32 gradient as soon as it is computed, and drop
    it."""

    def into(target: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if target.grad is None:
                target.grad = parameter.grad.float()
            else:
                target.grad += parameter.grad
            parameter.grad = None

        return add

    for name, parameter in model.named_parameters():
        if name in master and master[name] is not parameter:
            parameter.register_post_accumulate_grad_hook(into(master[name]))
