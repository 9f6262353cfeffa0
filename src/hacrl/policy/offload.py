"""Where what only an update needs waits between updates: on the device, or in the host's memory.

Agents that share a device learn in turn. While others do, and while anybody samples, an agent needs
its resident weights alone; its float32 master, the optimizer's moments and the start weights of the KL
term can wait on the host. The resident weights never move: captured graphs hold their addresses.

With offload = "auto" they wait there where the device is short of memory: where less than a third of it
would be free with everything at rest on it, every agent's weights, masters and moments and the kept keys
and values. What is free at one moment does not tell: an agent that is parked, or has not learned yet,
will want its share of it. `hacrl doctor` decides by the same rule (report/memory.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from hacrl.errors import first_line

SHORT = 1 / 3
"""A device is short of memory where less than this part of it is left beside what rests there: an
update's gradients and activations must fit into it."""
SLAB = 2**30
"""Bytes of pinned memory that are taken at once."""
ALIGNED = 256
"""A tensor in a slab begins at a multiple of so many bytes."""


# ---------------------------------------------------------------- whether to


class Tenant(Protocol):
    """An agent's weights, where they are on a device with others."""

    device: torch.device

    def absent_bytes(self) -> int:
        """Of what its updates need at rest on the device, what is not there now."""

    def step_aside(self) -> None:
        """Another tenant of the device learns now."""


_tenants: WeakSet[Tenant] = WeakSet()


def move_in(tenant: Tenant) -> None:
    """Count the tenant among those of its device, for as long as it lives."""
    _tenants.add(tenant)


def tenants_of(device: torch.device) -> list[Tenant]:
    return [t for t in _tenants if _place(t.device) == _place(device)]


def _place(device: torch.device) -> tuple[str, int]:
    """cuda is cuda:0."""
    return device.type, device.index or 0


def is_short(at_rest: float, whole: float) -> bool:
    """Whether a device of `whole` bytes has too little beside what is at rest on it.

    Example: is_short(110e9, 150e9) is True; is_short(62e9, 150e9) False
    """
    return at_rest > (1 - SHORT) * whole


def short_of_memory(device: torch.device) -> bool:
    """Whether a GPU is, once everything that this process keeps for it is there."""
    figures = memory_in_use(device)
    if figures is None:
        return False
    used, whole = figures
    return is_short(used + sum(t.absent_bytes() for t in tenants_of(device)), whole)


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """Bytes that anybody uses of a GPU, and all it has; what torch holds back for itself is not used.
    None for the host's own memory, where parking would gain nothing."""
    if device.type != "cuda":
        return None
    free, whole = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return whole - free, whole


# ---------------------------------------------------------------- what and where


@dataclass(frozen=True)
class Place:
    """A tensor that can be somewhere else.

    Example: Place("master/lm_head.weight", tensor, put) with put(other) in its place
    """

    name: str
    tensor: Tensor
    put: Callable[[Tensor], None]


def places(
    master: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, start: Any | None
) -> Iterator[Place]:
    """Of the master (such tensors as are not resident themselves), its moments, the start weights."""

    for name, tensor in master.items():
        yield Place(f"master/{name}", tensor.data, partial(setattr, tensor, "data"))
    for i, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            if value.dim():  # not the count of steps
                yield Place(f"{key}/{i}", value, partial(state.__setitem__, key))
    if start is not None:
        for name, tensor in start.named_parameters():
            yield Place(f"start/{name}", tensor.data, partial(setattr, tensor, "data"))


class Parking:
    """The host's memory for one agent; taken once, and kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parked = False
        self._host: dict[str, Tensor] = {}
        self._pinned = device.type == "cuda"  # the copy runs at the bus's full speed

    @torch.no_grad()
    def park(self, all_places: Iterator[Place]) -> None:
        moving = list(all_places)
        self._take([place for place in moving if place.name not in self._host])
        for place in moving:
            self._host[place.name].copy_(place.tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for place in moving:
            place.put(self._host[place.name])
        self.parked = True

    @torch.no_grad()
    def fetch(self, all_places: Iterator[Place]) -> None:
        if self.parked:
            for place in list(all_places):
                place.put(place.tensor.to(self.device, non_blocking=True, copy=True))
            self.parked = False

    def _take(self, new: Sequence[Place]) -> None:
        """Host memory for tensors that were never parked before."""
        plan = plan_slabs([place.tensor.nbytes for place in new])
        slabs = [self._slab(size) for size in plan.slabs]
        for place, (slab, start) in zip(new, plan.starts, strict=True):
            wanted = place.tensor
            taken = slabs[slab][start : start + wanted.nbytes]
            self._host[place.name] = taken.view(wanted.dtype).view(wanted.shape)

    def _slab(self, size: int) -> Tensor:
        if self._pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                warnings.warn(
                    "the host gives no more pinned memory, so what waits there between updates lies in "
                    "ordinary memory, and copying it takes longer; free some of the host's memory if "
                    "that is too long: "
                    f"{first_line(error)}",
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True)
class SlabPlan:
    """Tensors in few blocks of memory.

    Example: plan_slabs([300, 700], slab=1024) is SlabPlan(slabs=(1024, 512), starts=((1, 0), (0, 0)))
    """

    slabs: tuple[int, ...]
    """Bytes of each block."""
    starts: tuple[tuple[int, int], ...]
    """Of each tensor, its block and where in it it begins."""


def plan_slabs(sizes: Sequence[int], slab: int = SLAB) -> SlabPlan:
    """Blocks for tensors of these sizes. Each block's is a power of two, which torch rounds pinned ones
    up to: tensor by tensor, that takes a third more than all of them need. Large tensors come first, so
    that small ones fill what they leave."""
    aligned = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    left = sum(aligned)
    slabs: list[int] = []
    used: list[int] = []
    starts: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -aligned[i]):
        size = aligned[i]
        at = next((s for s, n in enumerate(slabs) if n - used[s] >= size), len(slabs))
        if at == len(slabs):
            slabs.append(max(_power_from(size), min(slab, _power_up_to(left))))
            used.append(0)
        starts[i] = at, used[at]
        used[at] += size
        left -= size
    return SlabPlan(tuple(slabs), tuple(starts[i] for i in range(len(sizes))))


def _power_from(size: int) -> int:
    """Least power of two that is no less."""
    return 1 << max(0, size - 1).bit_length()


def _power_up_to(size: int) -> int:
    """Largest power of two that is no more."""
    return 1 << max(0, size.bit_length() - 1)


# ---------------------------------------------------------------- when


class Turns:
    """One agent's turns to learn, on a device that it may share with others. It takes one at every
    update, and its agent lets it rest after the last one of a step.

    Example: turns.take(); ...; turns.rest()
    """

    def __init__(
        self,
        device: torch.device,
        wanted: str,
        model: Any,
        master: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        start: Any | None,
    ) -> None:
        """`wanted` is the agent's `offload`; `start` the model of the start weights, where there is
        one. Not the policy itself: who forgets a policy has its memory back at once."""
        self.device, self.wanted = device, wanted
        self.model, self.master, self.optimizer, self.start = model, master, optimizer, start
        self.parking = Parking(device)
        self._had_one = False
        """Whether it has learned since it was loaded."""
        move_in(self)

    def take(self) -> None:
        """What an update needs comes to the device, in the place of the last one's gradients."""
        self._drop_gradients()
        for tenant in tenants_of(self.device):
            if tenant is not self:
                tenant.step_aside()
        self.parking.fetch(self.movable())
        self._had_one = True

    def rest(self) -> None:
        """No update comes for a while: gradients go, and what else only updates need waits on the
        host, if the agent is set so or the device is short of memory."""
        self._drop_gradients()
        if self.parking.parked or self.wanted == "none":
            return
        if self.wanted == "optimizer" or short_of_memory(self.device):
            self.parking.park(self.movable())

    def step_aside(self) -> None:
        """Who has learned rests already; who was only loaded, or restored, has all of it still on the
        device."""
        if not self._had_one:
            self.rest()

    def absent_bytes(self) -> int:
        """It waits on the host, or it is moments, which the first update makes."""
        parked = self.movable() if self.parking.parked else ()
        new = (m for m in self.master.values() if not self.optimizer.state.get(m))
        return sum(p.tensor.nbytes for p in parked) + sum(2 * _local_bytes(m) for m in new)

    def movable(self) -> Iterator[Place]:
        """What can wait elsewhere: not the resident weights."""
        resident = {id(parameter) for parameter in self.model.parameters()}
        apart = {n: m for n, m in self.master.items() if id(m) not in resident}
        return places(apart, self.optimizer, self.start)

    def _drop_gradients(self) -> None:
        for parameter in self.master.values():
            parameter.grad = None


def _local_bytes(tensor: Any) -> int:
    """Of a sharded tensor the bytes of the shard on this rank."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
