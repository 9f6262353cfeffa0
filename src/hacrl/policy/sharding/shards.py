"""A model cut into shards by FSDP2: each rank keeps a part of every tensor, in float32.

A layer's weights are gathered for its forward and its backward, in the dtype it computes in, and let
go; gradients are summed over the ranks, never averaged, because a loss has the divisors of the whole
minibatch. The shards are the float32 master that the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hacrl.policy.batch import Inputs
from hacrl.policy.logprobs import LogProbs

T = TypeVar("T")


class Frame(nn.Module):
    """A sharded model, and around it a forward that does whatever it is given.

    FSDP gathers weights when a module's forward begins. Log-probabilities need the decoder and the
    head one after the other, not the model's own forward: so that work is this module's forward, and
    what lies outside the layers (embeddings, last norm, head) is there for its whole length.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()

    def gradient_checkpointing_enable(self, *settings: Any, **named: Any) -> None:
        self.model.gradient_checkpointing_enable(*settings, **named)


def shard_model(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> Frame:
    """Shard the model in place, layer by layer; only a layer at a time is whole on the device."""
    computes_in = (
        MixedPrecisionPolicy()
        if dtype == torch.float32
        else MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    )
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in reversed(list(model.modules())):  # inner ones first
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=computes_in)
    frame = Frame(model)
    # Free gathered weights after each forward: an update of the shards would make them stale.
    fully_shard(frame, mesh=mesh, mp_policy=computes_in, reshard_after_forward=True)
    for module in frame.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return frame


class ShardedLogProbs(LogProbs):
    """Those of a sharded model. Every rank of the group must ask for some, equally often."""

    def __init__(self, frame: Frame, temperature: float) -> None:
        self.frame = frame
        self._inside = False
        with torch.no_grad():
            self._in_frame(super().__init__, frame.model, temperature)

    def of_tokens(self, inputs: Inputs) -> Tensor:
        return self._in_frame(super().of_tokens, inputs)

    def _in_frame(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """With the weights gathered; they are already while the object makes its first measurements."""
        if self._inside:
            return work(*arguments, **named)
        self._inside = True
        try:
            return self.frame(lambda: work(*arguments, **named))
        finally:
            self._inside = False


def gathered(tensor: Tensor) -> Tensor:
    """All shards of a tensor together, on every rank; one that is not sharded as it is."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    whole: Any = tensor.detach()
    return whole.full_tensor()
