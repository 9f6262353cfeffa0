"""Where what only an update needs waits between updates: on the device, or in the host's memory.

Agents that share a device learn in turn. While others do, and while anybody samples, an agent needs
its resident weights alone; its float32 master, the optimizer's moments and the start weights of the KL
term can wait on the host. The resident weights never move: captured graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

SHORT = 1 / 3
"""offload = "auto": a device with less than this part of its memory free is short of it."""


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

    @torch.no_grad()
    def park(self, all_places: Iterator[Place]) -> None:
        moving = list(all_places)
        for place in moving:
            if place.name not in self._host:
                # pinned: the copy runs at the bus's full speed
                self._host[place.name] = torch.empty_like(
                    place.tensor, device="cpu", pin_memory=self.device.type == "cuda"
                )
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


def short_of_memory(device: torch.device) -> bool:
    """Whether little of a GPU is free; what torch holds back for itself counts as free."""
    if device.type != "cuda":
        return False
    free, whole = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free < SHORT * whole
