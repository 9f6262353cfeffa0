"""The seam between a policy and the processes ("ranks") that hold it.

A policy calls `ranks` at five points: to place its model, to choose the rows of a minibatch that this
process computes, to collect results, and to get or set a whole tensor. `OneRank` is the default: one
process and one device, so it places the model, chooses all rows, and returns values and tensors as they
are. To read the code of one GPU, skip every call of `ranks`.

With several ranks (sharding/), `ShardedRanks` has the same methods, and every rank runs the code of
`Policy` on its rows. Only one more thing shows in that code: a rank with fewer micro-batches than others
computes empty ones (gradients.py), because a sharded forward needs all ranks.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hacrl.config import AgentConfig
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.weights import (
    Weights,
    accumulate_in_master,
    enable_checkpointing,
    move_to_device,
    without_adapter,
)

T = TypeVar("T")


class OneRank:
    """The whole policy is in this process, on one device."""

    size = 1

    def place(
        self,
        model: Any,
        agent: AgentConfig,
        device: torch.device,
        temperature: float,
        *,
        keep_start: bool,
    ) -> Weights:
        """Move the model to its device, in the agent's dtype, and prepare it for scoring and training.
        `keep_start` keeps the start weights, for the KL term."""
        master = move_to_device(model, agent, device)
        if agent.gradient_checkpointing:
            enable_checkpointing(model)
        logprobs = LogProbs(model, temperature)
        start_model, start_logprobs = None, None
        if keep_start and agent.lora:
            start_logprobs = without_adapter(model, logprobs)
        elif keep_start:
            start_model = copy.deepcopy(model).requires_grad_(False).eval()
            start = LogProbs(start_model, temperature)
            logprobs.shares &= start.shares  # both get the same inputs
            start_logprobs = start.__call__
        accumulate_in_master(model, master)
        return Weights(model, master, logprobs, start_logprobs, start_model)

    def split(self, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> list[int]:
        """Indices of the sequences that this rank computes. Every rank passes the same arguments."""
        return list(range(len(lengths)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks. Every rank must call it."""
        return [value]

    def full(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, gathered if this rank holds a shard. Shards are converted to `dtype` first,
        because a gather of half the bytes takes half the time."""
        return tensor

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """A copy of what this rank holds of a full tensor, placed like `parameter`."""
        return full.to(parameter.device, copy=True)
