"""A policy over several ranks: sharded weights for learning, a whole copy on each rank for sampling.

Every rank has an ordinary `Policy` whose `ranks` are `ShardedRanks`. Rank 0's is a `ShardedPolicy`: it
is used like any other policy and broadcasts each call to the other ranks, which run `follow`. Every rank
must find the model under the same path or hub name.

Learning: the rows of a minibatch are split over the ranks. Every rank computes the same number of
micro-batches; a rank with fewer rows computes empty ones at the end. Gradients, losses and norms are
sums over the ranks, so all ranks decide alike, e.g. to skip an update.

Sampling: each rank samples a part of the replies with a whole copy of the weights, which updates
overwrite in place: no collectives while sampling, and fixed addresses for CUDA graphs. This costs 2
bytes per parameter on every rank in bfloat16. Scores are computed with the shards, so a stale copy shows
in the metrics that compare sampler and trainer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.policy.load import choose_dtype, move_model
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.policy import Policy
from hacrl.policy.ranks import OneRank
from hacrl.policy.sharding.fsdp import ShardedLogProbs, full_tensor, shard_model
from hacrl.policy.sharding.process_group import RankGroup
from hacrl.policy.sharding.split import in_order, split_rows
from hacrl.policy.weights import Weights, enable_checkpointing, without_adapter
from hacrl.sampling.base import Reply, Request
from hacrl.store.checkpoint import Checkpoint

T = TypeVar("T")
MIN_PROMPTS = 4
"""With at least this many prompts per rank, the rows of a minibatch are split by prompt."""


class ShardedRanks(OneRank):
    """Weights sharded over the ranks of a process group. All ranks call the same methods in the same
    order."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.size = group.size

    def place(
        self,
        model: Any,
        agent: AgentConfig,
        device: torch.device,
        temperature: float,
        *,
        keep_start: bool,
    ) -> Weights:
        if not agent.learns:
            return super().place(model, agent, device, temperature, keep_start=keep_start)
        dtype, mesh = choose_dtype(agent.dtype, device), self.group.mesh(device)
        start_network = None
        if keep_start and not agent.lora:
            start = copy.deepcopy(model).requires_grad_(False).eval()
            move_model(start, torch.device("cpu"), dtype)
            start_network = shard_model(start, mesh, dtype)
        network = shard_model(copy.deepcopy(model), mesh, dtype)
        move_model(model.requires_grad_(False), device, dtype)
        if agent.gradient_checkpointing:
            enable_checkpointing(network)
        logprobs = ShardedLogProbs(network, temperature)
        start_logprobs = None
        if keep_start and agent.lora:  # with the whole copy: nothing to gather
            start_logprobs = without_adapter(model, LogProbs(model, temperature))
        elif start_network is not None:
            sharded = ShardedLogProbs(start_network, temperature)
            logprobs.shares &= sharded.shares
            start_logprobs = sharded.__call__
        master = {n: p for n, p in network.model.named_parameters() if p.requires_grad}
        return Weights(network, master, logprobs, start_logprobs)

    def split(self, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> list[int]:
        rests = [n - len(p) for n, p in zip(lengths, prompts, strict=True)]
        return split_rows(prompts, rests, self.size, MIN_PROMPTS)[self.group.rank]

    def gather(self, value: T) -> list[T]:
        return self.group.all_gather(value)

    def full(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return full_tensor(tensor if dtype is None else tensor.to(dtype))

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        if self.group.rank:  # rank 0 sends the values
            full = torch.empty(parameter.shape, dtype=parameter.dtype)
        return distribute_tensor(
            full.to(parameter.device), parameter.device_mesh, parameter.placements
        )


def _on_all_ranks(method: str) -> Any:
    """The method of `Policy`, called on all ranks; returns rank 0's result."""

    def call(self: ShardedPolicy, *arguments: Any) -> Any:
        with self.group.collective():
            _set_device(self.device)
            self.group.broadcast((method, arguments))
            return getattr(Policy, method)(self, *arguments)

    return call


class ShardedPolicy(Policy):
    """The policy of rank 0. Its public methods run on all ranks."""

    def __init__(
        self,
        agent: AgentConfig,
        *,
        group: RankGroup,
        device: str,
        temperature: float,
        beta: float,
        sampler: SamplerConfig | None = None,
    ) -> None:
        self.group = group
        settings: dict[str, Any] = {"temperature": temperature, "beta": beta, "sampler": sampler}
        with group.collective():
            group.broadcast((agent, settings, torch.get_num_threads()))
            _set_device(torch.device(device))
            own = agent.model_copy(update={"device": device})
            super().__init__(own, device=device, ranks=ShardedRanks(group), **settings)
        self.sampler = RankSampler(group, self.sampler, self.device)

    score = _on_all_ranks("score")
    update = _on_all_ranks("update")
    gradient = _on_all_ranks("gradient")
    checkpoint = _on_all_ranks("checkpoint")
    offload = _on_all_ranks("offload")

    def restore(self, checkpoint: Checkpoint) -> None:
        self.check_names(checkpoint)
        # The other ranks receive names only; `shard` sends the values, tensor by tensor.
        moments = {
            key: value if key.startswith("step/") else torch.empty(0)
            for key, value in checkpoint.optimizer.items()
        }
        names = {name: torch.empty(0) for name in checkpoint.model}
        with self.group.collective():
            _set_device(self.device)
            outline = replace(checkpoint, model=names, optimizer=moments)
            self.group.broadcast(("restore", (outline,)))
            super().restore(checkpoint)

    def close(self) -> None:
        """End `follow` on the other ranks if they still work; the group can then hold another policy."""
        if not self.group.failed:
            with contextlib.suppress(RuntimeError), self.group.collective():
                self.group.broadcast(None)


class RankSampler:
    """The sampler of rank 0: every rank samples a part of the replies."""

    def __init__(self, group: RankGroup, own: Any, device: torch.device) -> None:
        self.group, self.own, self.device = group, own, device

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        with self.group.collective():
            _set_device(self.device)
            self.group.broadcast(("sample", (list(requests), temperature)))
            return _sample(self.group, self.own, requests, temperature)

    def weights_changed(self) -> None:
        self.own.weights_changed()


def follow(group: RankGroup, device: str) -> None:
    """The loop of a rank other than 0: take part in every call until rank 0 closes its policy. Raises
    `RunStopped` when rank 0 is gone."""
    try:
        if (received := group.receive()) is None:
            return
        agent, settings, threads = received
        torch.set_num_threads(threads)
        _set_device(torch.device(device))
        own = agent.model_copy(update={"device": device})
        policy = Policy(own, device=device, ranks=ShardedRanks(group), **settings)
        while (received := group.receive()) is not None:
            method, arguments = received
            if method == "sample":
                _sample(group, policy.sampler, *arguments)
            elif method == "checkpoint":  # take part in the gathers, keep nothing
                for tensor in (*policy.master.values(), *policy.optimizer_tensors().values()):
                    policy.ranks.full(tensor)
            else:
                getattr(policy, method)(*arguments)
    except BaseException as error:
        group.report_failure(error)
        raise


def _sample(
    group: RankGroup, sampler: Any, requests: Sequence[Request], temperature: float
) -> list[Reply]:
    """Sample this rank's part of the replies; rank 0 gets all of them."""
    prompts, limits = [r.prompt_ids for r in requests], [r.limit for r in requests]
    parts = split_rows(prompts, limits, group.size)
    mine = [requests[i] for i in parts[group.rank]]
    return in_order(parts, group.gather(sampler.sample(mine, temperature) if mine else []))


def _set_device(device: torch.device) -> None:
    """Set the current GPU, which FSDP uses: the agents of one process may have different ones."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
