"""Products of a decode step that read the same input, made one while a graph is being captured.

With few rows a product takes little longer than its launch: queries, keys and values are three where
one would do, gate and up are two. Their weights are laid end to end in one tensor, once, and each
parameter becomes a view of its part. So there is still one copy of the weights, whatever overwrites
a parameter in place is seen by the joined product, and scoring, updates, checkpoints and exports keep
the library's own modules and names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

JOIN = True
"""False: every product by itself, and no parameter is moved."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that read the same input, by the names that nearly all decoders use."""
ALIGNED = 16
"""Bytes to which each part must be aligned: kernels are slower from elsewhere."""


class Joined:
    """The joined products of a model. Weights are moved here, so make it before a graph holds their
    addresses; those of a model that has been joined before stay where they are.

    Example: joined = Joined(model); with joined.on(): capture()
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups = list(_groups(model)) if JOIN else []
        moved = [_lay(parts) for group in self.groups for parts in group.tensors()]
        if any(moved) and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the old pieces are too small for whatever comes next

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """In each group, the first member that is called computes for all."""
        try:
            for group in self.groups:
                whole = [_whole(parts) for parts in group.tensors()]
                product, start = _Product(*whole, members=len(group.members)), 0
                for name, member in group.members.items():
                    setattr(group.owner, name, _Part(member, product, start))
                    start += member.out_features
            yield
        finally:
            for group in self.groups:
                for name, member in group.members.items():
                    setattr(group.owner, name, member)


@dataclass(frozen=True)
class _Group:
    owner: nn.Module
    members: dict[str, nn.Linear]

    def tensors(self) -> list[list[Tensor]]:
        """Weights, and biases where there are any."""
        biases: list[Tensor] = [m.bias for m in self.members.values() if m.bias is not None]
        return [[m.weight for m in self.members.values()], *([biases] if biases else [])]


class _Product:
    """What the members of a group share; between the first call and the last, also the result."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, members: int) -> None:
        # as parameters: torch.compile takes the shapes of these, and no others, for constant
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.members, self.left = members, 0
        self.input: Any = None
        self.output: Any = None


class _Part(nn.Module):
    """Stands in for a member: for all layers one class, so that a module around it is compiled once."""

    def __init__(self, member: nn.Linear, product: _Product, start: int) -> None:
        super().__init__()
        self.weight, self.bias, self.product = member.weight, member.bias, product
        self.start, self.end = start, start + member.out_features

    def forward(self, input: Tensor) -> Tensor:
        shared = self.product
        if not shared.left:
            shared.input, shared.left = input, shared.members
            shared.output = linear(input, shared.weight, shared.bias)
        elif input is not shared.input:  # they do not read the same after all
            return linear(input, self.weight, self.bias)
        part: Tensor = shared.output[..., self.start : self.end]
        shared.left -= 1
        if not shared.left:
            shared.input = shared.output = None
        return part


def _groups(model: nn.Module) -> Iterator[_Group]:
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    holds = Counter(_storage(p) for p in model.parameters() if type(p) is nn.Parameter)
    for owner in model.modules():
        for names in SIBLINGS:
            members = {n: m for n in names if is_plain(m := owner._modules.get(n))}
            group = _Group(owner, members)  # type: ignore[arg-type]
            if len(members) == len(names) and _alike(list(group.members.values())):
                parts = [p for parts in group.tensors() for p in parts]
                alone = all(uses[id(p)] == holds[_storage(p)] == 1 for p in parts)
                if alone or all(map(_end_to_end, group.tensors())):
                    yield group


def is_plain(module: nn.Module | None) -> bool:
    """A product and nothing else: no adapter, quantised or sharded weights, nothing hooked in."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and all(type(p) is nn.Parameter for p in module.parameters())


def _alike(members: Sequence[nn.Linear]) -> bool:
    weights = [m.weight for m in members]
    kinds = {(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in members}
    return len(kinds) == 1 and not any(len(w) * w.element_size() % ALIGNED for w in weights)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _end_to_end(parts: Sequence[Tensor]) -> bool:
    """Whether each begins in memory where the one before ends."""
    starts = [p.data_ptr() for p in parts]
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parts if p.is_contiguous()]
    return len({_storage(p) for p in parts}) == 1 and starts[1:] == ends[:-1]


def _lay(parts: Sequence[Tensor]) -> bool:
    """Put tensors end to end. Whether they were not."""
    if _end_to_end(parts):
        return False
    whole = torch.cat([p.data for p in parts])
    for part, piece in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = piece
    return True


def _whole(parts: Sequence[Tensor]) -> Tensor:
    _lay(parts)  # again, if the model has been to another device
    first = parts[0].data
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
