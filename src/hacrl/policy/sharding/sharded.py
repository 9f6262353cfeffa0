"""One agent's policy over several ranks: shards for learning, a whole copy on each rank for sampling.

Rank 0 holds the agent with a `ShardedPolicy`, which is used as a `Policy` is; the other ranks follow:

    store = open_store(host)                                        # rank 0, in policy/sharding/group.py
    group = join_group(0, world, f"{host}:{store.port}", device="cuda", agent="wren", store=store)
    policy = ShardedPolicy(agent_config, group=group, device="cuda", temperature=1.0, beta=0.0)
    ...
    policy.close()                                                  # followers return from follow()

    group = join_group(rank, world, address, device="cuda", agent="wren")     # every other rank
    follow(group, device="cuda")

`device` is the rank's own (cpu, cuda, cuda:1 ...): it takes the place of the config's. What else a
follower needs it hears from rank 0; the model folder must be there under the same path or hub name.

Learning: the rows of a minibatch are dealt over the ranks, and every rank makes the same number of
passes, empty ones at the end where it has fewer rows. Whether the survivors of pruning go through
again alone is decided for each round of micro-batches, from all ranks' tokens together. Gradients,
losses and norms are sums over the ranks, so every rank takes the same decisions.

Sampling: each rank writes its share of the replies with a whole copy of the weights, which every
update refreshes in place: no collectives in between, and fixed addresses for captured graphs. The
price is that copy (2 bytes a parameter in bfloat16) on every rank. Scores come from the shards, so a
stale copy would be seen in the agreement of sampler and trainer.

Checkpoints are those of an unsharded policy: whole tensors, gathered on rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.errors import RunStopped
from hacrl.policy.load import move_model
from hacrl.policy.logprobs import Inputs, LogProbs
from hacrl.policy.lora import adapter_off
from hacrl.policy.offload import Turns
from hacrl.policy.policy import Policy
from hacrl.policy.sharding.dealing import deal_prompts, in_order, merge_sums
from hacrl.policy.sharding.group import Group
from hacrl.policy.sharding.shards import Frame, ShardedLogProbs, ShardTurns, gathered, shard_model
from hacrl.policy.update import Loss, Pass, Sums, UpdateReport
from hacrl.sampling.base import Reply, Request
from hacrl.store.checkpoint import Checkpoint
from hacrl.types import LossOutput, MicroBatch, Sample, Update

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]

PROMPTS_A_RANK = 4
"""From so many on, rows are dealt by prompts; fewer are too few to give every rank about the same."""


class Shard(Policy):
    """One rank's part. The methods `share_...` are called on every rank at once."""

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
        _use(torch.device(device))
        super().__init__(
            agent.model_copy(update={"device": device}),
            device=device,
            temperature=temperature,
            beta=beta,
            sampler=sampler,
        )
        self.own_sampler = self.sampler
        self._without_adapter = LogProbs(self.model, temperature) if agent.lora else None
        pad = self.renderer.pad_id
        self._idle = Sample(
            problem_id="",
            index=0,
            source="",
            is_own=False,
            token_ids=(pad, pad),
            loss_mask=(0, 1),
            behaviour=0.0,
            old_logprobs=(0.0,),
            source_logprobs=(0.0,),
        )

    # ------------------------------------------------------------ the weights

    def _place(self, dtype: torch.dtype) -> dict[str, Tensor]:
        if not self.agent.learns:
            return super()._place(dtype)
        mesh = self.group.mesh(self.device)
        if self._kl and not self.agent.lora:
            start = copy.deepcopy(self.model).requires_grad_(False).eval()
            move_model(start, torch.device("cpu"), dtype)
            self._start_frame = shard_model(start, mesh, dtype)
        self.network = shard_model(copy.deepcopy(self.model), mesh, dtype)
        move_model(self.model.requires_grad_(False), self.device, dtype)
        return {n: p for n, p in self.network.model.named_parameters() if p.requires_grad}

    def _scorer(self, model: Any, temperature: float) -> LogProbs:
        if isinstance(model, Frame):
            return ShardedLogProbs(model, temperature)
        return super()._scorer(model, temperature)

    def _frozen_copy(self) -> Any:
        return self._start_frame

    def _make_turns(self) -> Turns:
        offload = self.agent.offload
        return ShardTurns(self.device, offload, self.model, self.master, self.optimizer, None)

    @torch.no_grad()
    def _write_back(self) -> None:
        self.network.forget_gathered()
        for parameter, master in self._resident():
            parameter.copy_(gathered(master.to(parameter.dtype)))

    def _whole(self, tensor: Tensor) -> Tensor:
        whole = gathered(tensor)
        return super()._whole(whole) if self.group.rank == 0 else torch.empty(0)

    def _part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        if self.group.rank:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        return distribute_tensor(
            whole.to(parameter.device), parameter.device_mesh, parameter.placements
        )

    # ------------------------------------------------------------ an update, in step

    def _mine(self, samples: Sequence[Sample], chosen: Sequence[int]) -> Sequence[int]:
        mine: list[int] = []
        # Rows of advantage 0 may be left out: dealt by themselves, they unbalance nobody.
        for rows in (
            [i for i in chosen if samples[i].advantage != 0],
            [i for i in chosen if samples[i].advantage == 0],
        ):
            prompts = [samples[i].prompt_ids for i in rows]
            rests = [len(samples[i].token_ids) - len(p) for i, p in zip(rows, prompts, strict=True)]
            hands = deal_prompts(prompts, rests, self.group.size, PROMPTS_A_RANK)
            mine += [rows[i] for i in hands[self.group.rank]]
        return mine

    def _together(self, sums: Sums) -> Sums:
        return merge_sums(self.group.exchange(sums))

    def _rounds(self, planned: list[list[int]]) -> list[list[int]]:
        return planned + [[] for _ in range(self.group.largest(len(planned)) - len(planned))]

    def _idle_forward(self) -> None:
        self.logprobs(self._inputs([self._idle]))

    def _begin(
        self, rows: Sequence[int], samples: Sequence[Sample], loss: Loss, update: Update
    ) -> Pass:
        if rows:
            return super()._begin(rows, samples, loss, update)
        # The very same pass, of a row without loss: the collectives come in the same order.
        begun = super()._begin([0], [self._idle], _no_loss, update)
        nothing = torch.zeros(0)
        return replace(begun, rows=[], output=LossOutput(torch.zeros(()), nothing, nothing.bool()))

    def _pass_again(self, rows: Sequence[int], samples: Sequence[Sample], gradients: Any) -> None:
        if rows:
            super()._pass_again(rows, samples, gradients)
        else:
            zero = {len(samples): torch.zeros(1, device=self.device)}
            super()._pass_again([len(samples)], [*samples, self._idle], zero)

    def _everywhere(self, *counts: int) -> tuple[int, ...]:
        return tuple(self.group.sums(*counts))

    @torch.no_grad()
    def _start_logprobs(self, inputs: Inputs) -> Tensor:
        if self._without_adapter is None:
            return super()._start_logprobs(inputs)
        with adapter_off(self.model):  # the whole copy, so that nothing need be gathered
            return self._without_adapter(inputs)

    def _gather_gradients(self) -> None:
        """The shards' gradients are float32 already, and summed by FSDP."""

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        for parameter in self.master.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad.to_local() for p in self.master.values()]  # type: ignore[union-attr]
        square = get_total_norm(gradients) ** 2
        dist.all_reduce(square, group=self.group.tensors)
        norm = square.sqrt()
        scale = (self.agent.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        return norm.item()

    # ------------------------------------------------------------ what all ranks do at once

    def share_score(self, sequences: Sequences) -> list[list[float]]:
        prompts = [tuple(p) for p, _ in sequences]
        replies = [len(r) for _, r in sequences]
        hands = deal_prompts(prompts, replies, self.group.size, PROMPTS_A_RANK)
        mine = Policy.score(self, [sequences[i] for i in hands[self.group.rank]])
        return in_order(hands, self.group.collect(mine))

    def share_sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        prompts, limits = [r.prompt_ids for r in requests], [r.limit for r in requests]
        hands = deal_prompts(prompts, limits, self.group.size)
        mine = [requests[i] for i in hands[self.group.rank]]
        replies = self.own_sampler.sample(mine, temperature) if mine else []
        return in_order(hands, self.group.collect(replies))

    def share_update(self, samples: Sequence[Sample], loss: Loss, update: Update) -> UpdateReport:
        return Policy.update(self, samples, loss, update)

    def share_gradient(
        self,
        samples: Sequence[Sample],
        rows: Sequence[int],
        loss: Loss,
        update: Update,
    ) -> dict[str, Tensor]:
        found = Policy.gradient(self, samples, rows, loss, update)
        return {name: gathered(gradient) for name, gradient in found.items()}

    def share_snapshot(self, step: int) -> Checkpoint:
        return Policy.snapshot(self, step)

    def share_rest(self) -> None:
        Policy.rest(self)

    def share_restore(self, snapshot: Checkpoint) -> None:
        Policy.restore(self, snapshot)


class ShardedPolicy(Shard):
    """Rank 0: a policy like any other to its agent."""

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
        settings: dict[str, Any] = {"temperature": temperature, "beta": beta, "sampler": sampler}
        with group.together():
            group.tell((agent, settings, torch.get_num_threads()))
            super().__init__(agent, group=group, device=device, **settings)
        self.sampler = GroupSampler(self)

    def score(self, sequences: Sequences) -> list[list[float]]:
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

    def snapshot(self, step: int) -> Checkpoint:
        return self.everywhere("snapshot", step)

    def restore(self, snapshot: Checkpoint) -> None:
        self.check_names(snapshot)
        names = {name: torch.empty(0) for name in snapshot.model}
        moments = {
            key: value if key.startswith("step/") else torch.empty(0)
            for key, value in snapshot.optimizer.items()
        }
        # Others hear which tensors come; what is in them comes in parts, tensor by tensor.
        heard = replace(snapshot, model=names, optimizer=moments)
        self.everywhere("restore", heard, own=(snapshot,))

    def rest(self) -> None:
        self.everywhere("rest")

    def close(self) -> None:
        """Let the followers go, if they are still in step; the group can then hold another policy."""
        if not self.group.broken:
            with self.group.together():
                self.group.tell(None)

    def everywhere(self, work: str, *told: Any, own: tuple[Any, ...] | None = None) -> Any:
        """Do a share on every rank; rank 0's result."""
        with self.group.together():
            _use(self.device)
            self.group.tell((work, told))
            return getattr(self, f"share_{work}")(*(told if own is None else own))


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
    """Do a rank's shares until rank 0 lets go. Raises `RunStopped` when rank 0 is gone."""
    try:
        heard = _hear(group)
        if heard is None:
            return
        agent, settings, threads = heard
        torch.set_num_threads(threads)
        shard = Shard(agent, group=group, device=device, **settings)
        while (heard := _hear(group)) is not None:
            work, told = heard
            getattr(shard, f"share_{work}")(*told)
    except BaseException as error:
        group.leave_reason(error)
        raise


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


def _no_loss(batch: MicroBatch, update: Update) -> LossOutput:
    rows = len(batch.logprobs_BT)
    return LossOutput(
        loss=(batch.logprobs_BT * 0.0).sum(),
        ratio_B=torch.ones(rows),
        used_B=torch.zeros(rows, dtype=torch.bool),
    )
