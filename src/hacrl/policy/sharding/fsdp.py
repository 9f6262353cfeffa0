"""A model sharded by FSDP2: each rank keeps a part of every tensor, in float32.

A layer's weights are gathered for its forward and its backward, in the dtype of the computation, and
freed after it. Gradients are summed over the ranks, not averaged: losses are already divided by the
counts of the whole minibatch. The shards are the float32 master that the optimizer steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hacrl.policy.batch import Inputs
from hacrl.policy.logprobs import LogProbs

T = TypeVar("T")


class FSDPRoot(nn.Module):
    """The root module of a sharded model; its forward calls the function that it is given.

    FSDP gathers a module's weights when its forward begins. Log-probabilities use the decoder and the
    head separately instead of the model's forward. Inside this forward the weights outside the layers
    (embeddings, last norm, head) are gathered.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()

    def gradient_checkpointing_enable(self, *arguments: Any) -> None:
        self.model.gradient_checkpointing_enable(*arguments)


def shard_model(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> FSDPRoot:
    """Shard the model in place, layer by layer; only one whole layer at a time is on the device."""
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in reversed(list(model.modules())):  # inner modules first
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    root = FSDPRoot(model)
    # Free gathered weights after each forward: an update of the shards would make them stale.
    fully_shard(root, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
    return root


class ShardedLogProbs(LogProbs):
    """Log-probabilities of a sharded model. All ranks must compute the same number of micro-batches."""

    def __init__(self, root: FSDPRoot, temperature: float) -> None:
        self.root = root
        self._gathered = False
        with torch.no_grad():
            self._with_weights(partial(super().__init__, root.model, temperature))

    def of_tokens(self, inputs: Inputs) -> Tensor:
        return self._with_weights(partial(super().of_tokens, inputs))

    def _with_weights(self, function: Callable[[], T]) -> T:
        """Call it with gathered weights. They already are when __init__ measures log-probabilities."""
        if self._gathered:
            return function()
        self._gathered = True
        try:
            return self.root(function)
        finally:
            self._gathered = False


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks if it is sharded."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
