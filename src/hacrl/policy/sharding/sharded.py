"""One agent's policy over several ranks: shards for learning, a whole copy on each rank for sampling.

Every rank holds an ordinary `Policy` whose `ranks` are `ShardedRanks`. Rank 0's is a `ShardedPolicy`,
which the agent uses like any other; it broadcasts each call to the other ranks, which follow:

    store = open_store(host)                                        # rank 0, in policy/sharding/group.py
    group = join_group(0, world, f"{host}:{store.port}", device="cuda", agent="wren", store=store)
    policy = ShardedPolicy(agent_config, group=group, device="cuda", temperature=1.0, beta=0.0)
    ...
    policy.close()                                                  # followers return from follow()

    group = join_group(rank, world, address, device="cuda", agent="wren")     # every other rank
    follow(group, device="cuda")

`device` is the rank's own (cpu, cuda, cuda:1 ...) and replaces the config's. The model folder must be
available to every rank under the same path or hub name.

Learning: the rows of a minibatch are split over the ranks, and every rank makes the same number of
passes, empty ones at the end where it has fewer rows. Gradients, losses and norms are sums over the
ranks, so every rank takes the same decisions.

Sampling: each rank samples a part of the replies with a whole copy of the weights, which every update
refreshes in place: no collectives while sampling, and fixed addresses for captured graphs. The price is
that copy (2 bytes a parameter in bfloat16) on every rank. Scores come from the shards, so a stale copy
shows in the agreement of sampler and trainer.

Checkpoints are those of an unsharded policy: whole tensors, gathered on rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.errors import RunStopped
from hacrl.policy.load import choose_dtype, move_model
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.policy import Policy
from hacrl.policy.ranks import OneRank
from hacrl.policy.sharding.dealing import deal_prompts, in_order
from hacrl.policy.sharding.group import Group
from hacrl.policy.sharding.shards import ShardedLogProbs, gathered, shard_model
from hacrl.policy.update import Loss, UpdateReport
from hacrl.policy.weights import Weights, enable_checkpointing, without_adapter
from hacrl.sampling.base import Reply, Request
from hacrl.store.checkpoint import Checkpoint
from hacrl.types import Sample, Update

T = TypeVar("T")
PROMPTS_A_RANK = 4
"""With at least this many prompts per rank, rows are split by prompt; fewer would be too uneven."""


class ShardedRanks(OneRank):
    """Weights sharded over the ranks of a group. Every rank calls the same methods in the same order."""

    def __init__(self, group: Group) -> None:
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
        start_frame = None
        if keep_start and not agent.lora:
            start = copy.deepcopy(model).requires_grad_(False).eval()
            move_model(start, torch.device("cpu"), dtype)
            start_frame = shard_model(start, mesh, dtype)
        network = shard_model(copy.deepcopy(model), mesh, dtype)
        move_model(model.requires_grad_(False), device, dtype)
        if agent.gradient_checkpointing:
            enable_checkpointing(network)
        logprobs = ShardedLogProbs(network, temperature)
        start_logprobs = None
        if keep_start and agent.lora:  # on the whole copy: nothing to gather
            start_logprobs = without_adapter(model, LogProbs(model, temperature))
        elif start_frame is not None:
            sharded = ShardedLogProbs(start_frame, temperature)
            logprobs.shares &= sharded.shares
            start_logprobs = sharded.__call__
        master = {n: p for n, p in network.model.named_parameters() if p.requires_grad}
        return Weights(network, master, logprobs, start_logprobs)

    def split(self, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> list[int]:
        rests = [n - len(p) for n, p in zip(lengths, prompts, strict=True)]
        return deal_prompts(prompts, rests, self.size, PROMPTS_A_RANK)[self.group.rank]

    def gather(self, value: T) -> list[T]:
        return self.group.exchange(value)

    def full(self, tensor: Tensor) -> Tensor:
        return gathered(tensor)

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        if self.group.rank:  # rank 0 sends the values
            full = torch.empty(parameter.shape, dtype=parameter.dtype)
        return distribute_tensor(
            full.to(parameter.device), parameter.device_mesh, parameter.placements
        )


def make_shard(agent: AgentConfig, group: Group, device: str, **settings: Any) -> Policy:
    """The policy of a rank other than 0."""
    _use(torch.device(device))
    own = agent.model_copy(update={"device": device})
    return Policy(own, device=device, ranks=ShardedRanks(group), **settings)


class ShardedPolicy(Policy):
    """Rank 0's policy. Its public methods run on every rank at once."""

    def __init__(
        self,
        agent: AgentConfig,
        *,
        group: Group,
        device: str,
        temperature: float,
        beta: float,
        sampler: SamplerConfig | None = None,
    ) -> None:
        self.group = group
        settings: dict[str, Any] = {"temperature": temperature, "beta": beta, "sampler": sampler}
        with group.together():
            group.tell((agent, settings, torch.get_num_threads()))
            _use(torch.device(device))
            own = agent.model_copy(update={"device": device})
            super().__init__(own, device=device, ranks=ShardedRanks(group), **settings)
        self.own_sampler = self.sampler
        self.sampler = GroupSampler(self)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        return self.everywhere("score", list(sequences))

    def update(
        self,
        samples: Sequence[Sample],
        loss: Loss,
        update: Update,
    ) -> UpdateReport:
        return self.everywhere("update", list(samples), loss, update)

    def gradient(
        self,
        samples: Sequence[Sample],
        rows: Sequence[int],
        loss: Loss,
        update: Update,
    ) -> dict[str, Tensor]:
        return self.everywhere("gradient", list(samples), list(rows), loss, update)

    def checkpoint(self, step: int) -> Checkpoint:
        return self.everywhere("checkpoint", step)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.check_names(checkpoint)
        # The others receive names only; the values come in shards, tensor by tensor.
        moments = {
            key: value if key.startswith("step/") else torch.empty(0)
            for key, value in checkpoint.optimizer.items()
        }
        names = {name: torch.empty(0) for name in checkpoint.model}
        heard = replace(checkpoint, model=names, optimizer=moments)
        with self.group.together():
            _use(self.device)
            self.group.tell(("restore", (heard,), {}))
            super().restore(checkpoint)

    def offload(self) -> None:
        self.everywhere("offload")

    def close(self) -> None:
        """Release the followers, if the group still works; it can then hold another policy."""
        if not self.group.broken:
            with self.group.together():
                self.group.tell(None)

    def everywhere(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method on every rank; returns rank 0's result."""
        with self.group.together():
            _use(self.device)
            self.group.tell((method, arguments, named))
            if method == "sample":
                return _sample(self.group, self.own_sampler, *arguments)
            return getattr(super(), method)(*arguments, **named)


class GroupSampler:
    """Rank 0's sampler: every rank writes a share of the replies."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self.policy = policy

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        return self.policy.everywhere("sample", list(requests), temperature)

    def weights_changed(self) -> None:
        self.policy.own_sampler.weights_changed()


def follow(group: Group, device: str) -> None:
    """Run a rank's part of every call until rank 0 closes its policy. Raises `RunStopped` when rank 0
    is gone."""
    try:
        heard = _hear(group)
        if heard is None:
            return
        agent, settings, threads = heard
        torch.set_num_threads(threads)
        policy = make_shard(agent, group, device, **settings)
        while (heard := _hear(group)) is not None:
            method, arguments, named = heard
            if method == "sample":
                _sample(group, policy.sampler, *arguments)
            elif method == "checkpoint":  # take part in the gathers, keep nothing
                for tensor in (*policy.master.values(), *policy.optimizer_tensors().values()):
                    policy.ranks.full(tensor)
            else:
                getattr(policy, method)(*arguments, **named)
    except BaseException as error:
        group.leave_reason(error)
        raise


def _sample(
    group: Group, sampler: Any, requests: Sequence[Request], temperature: float
) -> list[Reply]:
    """Sample this rank's part of the replies; rank 0 gets all of them."""
    prompts, limits = [r.prompt_ids for r in requests], [r.limit for r in requests]
    hands = deal_prompts(prompts, limits, group.size)
    mine = [requests[i] for i in hands[group.rank]]
    return in_order(hands, group.collect(sampler.sample(mine, temperature) if mine else []))


def _hear(group: Group) -> Any:
    try:
        return group.hear()
    except RuntimeError as error:
        raise RunStopped(
            f"agent {group.agent!r}, rank {group.rank}: rank 0 of the group is gone, so this rank "
            "ends, too."
        ) from error


def _use(device: torch.device) -> None:
    """FSDP works on the current GPU, and agents of one process may have several."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
