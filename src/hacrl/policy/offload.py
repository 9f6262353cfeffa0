"""Moves what only updates need between device and host: master, optimizer moments, start weights.

Agents that share a device learn in turn. While another agent learns, and while any agent samples, an
agent needs only its model; its float32 master, the optimizer's moments and the start weights of the KL
term can be on the host. The model itself never moves: captured CUDA graphs hold its addresses.

offload = "auto" moves them only if the device is short of memory: if less than a third of it would be
free with everything on it (the weights, masters and moments of all agents, and the KV caches). The
memory that is free at one moment does not decide, because an agent that is offloaded, or has not learned
yet, will need its part. `hacrl doctor` uses the same rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from hacrl.errors import first_line

MIN_FREE = 1 / 3
"""A device is short of memory if less than this fraction is free: an update's gradients and activations
must fit into it."""
SLAB = 2**30  # bytes of pinned memory that are allocated at a time
ALIGNMENT = 256  # a tensor in a slab starts at a multiple of this many bytes

_offloaders: WeakSet[Offloader] = WeakSet()  # those of all policies in this process


def is_short(at_rest: float, capacity: float) -> bool:
    """Whether a device of `capacity` bytes is short of memory with `at_rest` bytes between updates.

    Example: is_short(110e9, 150e9) is True; is_short(62e9, 150e9) False
    """
    return at_rest > (1 - MIN_FREE) * capacity


def short_of_memory(device: torch.device) -> bool:
    """Whether a GPU would be short of memory with everything of this process's policies on it."""
    figures = memory_in_use(device)
    if figures is None:
        return False
    used, capacity = figures
    return is_short(used + sum(o.absent_bytes() for o in on_device(device)), capacity)


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """(bytes in use by any process, capacity) of a GPU; memory that torch only caches counts as free.
    None for the CPU, where offloading gains nothing."""
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return capacity - free, capacity


def on_device(device: torch.device) -> list[Offloader]:
    """The offloaders of the policies on a device; cuda is cuda:0."""
    wanted = device.type, device.index or 0
    return [o for o in _offloaders if (o.device.type, o.device.index or 0) == wanted]


class Movable(NamedTuple):
    """A tensor and a function that replaces it by a copy elsewhere."""

    name: str
    tensor: Tensor
    put: Callable[[Tensor], None]


class Offloader:
    """Moves one policy's tensors. The policy calls `begin_update` before each update and `end_updates`
    after the last update of a step.

    Example: offloader.begin_update(); ...; offloader.end_updates()
    """

    def __init__(
        self,
        device: torch.device,
        setting: str,
        model: Any,
        master: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        start_model: Any | None,
    ) -> None:
        """`setting` is the agent's `offload`. The policy itself is not stored: its memory must be free
        as soon as the caller drops it."""
        self.device, self.setting = device, setting
        self.model, self.master, self.optimizer = model, master, optimizer
        self.start_model = start_model
        self.offloaded = False
        self._has_learned = False
        self._host: dict[str, Tensor] = {}  # host memory by tensor name: allocated once and kept
        self._pinned = device.type == "cuda"  # pinned memory is copied at the full speed of the bus
        _offloaders.add(self)

    @torch.no_grad()
    def begin_update(self) -> None:
        """Drop the last gradients and bring back what was offloaded."""
        self._drop_gradients()
        for other in on_device(self.device):
            # An agent that has learned is already offloaded, after its last update. One that was only
            # loaded or restored may still hold its optimizer state on the device.
            if other is not self and not other._has_learned:
                other.end_updates()
        if self.offloaded:
            for item in self.movable():
                item.put(item.tensor.to(self.device, non_blocking=True, copy=True))
            self.offloaded = False
        self._has_learned = True

    def end_updates(self) -> None:
        """Drop gradients; offload if the setting says so or the device is short of memory."""
        self._drop_gradients()
        if self.offloaded or self.setting == "none":
            return
        if self.setting == "optimizer" or short_of_memory(self.device):
            self.to_host()

    @torch.no_grad()
    def to_host(self) -> None:
        """Copy everything movable to the host and free it on the device."""
        moving = self.movable()
        self._allocate([item for item in moving if item.name not in self._host])
        for item in moving:
            self._host[item.name].copy_(item.tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for item in moving:
            item.put(self._host[item.name])
        self.offloaded = True

    def absent_bytes(self) -> int:
        """Bytes that updates will need on the device and that are not there now: what is offloaded, and
        the two moments of each parameter before the first update."""
        offloaded = self.movable() if self.offloaded else []
        new = [m for m in self.master.values() if not self.optimizer.state.get(m)]
        return sum(i.tensor.nbytes for i in offloaded) + sum(2 * _local_bytes(m) for m in new)

    def movable(self) -> list[Movable]:
        """Master (unless the model is its own master), moments and start weights."""
        resident = {id(parameter) for parameter in self.model.parameters()}
        found = [
            Movable(f"master/{name}", tensor.data, partial(setattr, tensor, "data"))
            for name, tensor in self.master.items()
            if id(tensor) not in resident
        ]
        for i, state in enumerate(self.optimizer.state.values()):
            found += [
                Movable(f"{key}/{i}", value, partial(state.__setitem__, key))
                for key, value in state.items()
                if value.dim()  # not the step counter
            ]
        if self.start_model is not None:
            found += [
                Movable(f"start/{name}", tensor.data, partial(setattr, tensor, "data"))
                for name, tensor in self.start_model.named_parameters()
            ]
        return found

    def _drop_gradients(self) -> None:
        for parameter in self.master.values():
            parameter.grad = None

    def _allocate(self, new: Sequence[Movable]) -> None:
        """Host memory for tensors that are offloaded for the first time."""
        sizes, places = plan_slabs([item.tensor.nbytes for item in new])
        slabs = [self._slab(size) for size in sizes]
        for item, (slab, start) in zip(new, places, strict=True):
            part = slabs[slab][start : start + item.tensor.nbytes]
            self._host[item.name] = part.view(item.tensor.dtype).view(item.tensor.shape)

    def _slab(self, size: int) -> Tensor:
        if self._pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                warnings.warn(
                    "offload: no pinned host memory left, using pageable memory; copies between host "
                    f"and GPU are slower. Free host memory to avoid this ({first_line(error)}).",
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8)


def plan_slabs(sizes: Sequence[int], slab: int = SLAB) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack tensors of these byte sizes into few slabs: (slab sizes, (slab, start) of each tensor).

    torch rounds pinned allocations up to powers of two; one allocation per tensor would waste a third.
    Largest tensors first, so that small ones fill the gaps.

    Example: plan_slabs([300, 700], slab=1024) == ([1024, 512], [(1, 0), (0, 0)])
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left = sum(aligned)
    slabs: list[int] = []
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -aligned[i]):
        size = aligned[i]
        at = next((s for s, n in enumerate(slabs) if n - used[s] >= size), len(slabs))
        if at == len(slabs):
            fill = 1 << max(0, left.bit_length() - 1)  # the largest power of two up to `left`
            slabs.append(max(1 << (size - 1).bit_length(), min(slab, fill)))
            used.append(0)
        places[i] = at, used[at]
        used[at] += size
        left -= size
    return slabs, [places[i] for i in range(len(sizes))]


def _local_bytes(tensor: Any) -> int:
    """Bytes on this rank; of a sharded tensor only its shard."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
