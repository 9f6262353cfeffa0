"""Linear layers with the same input, computed as one product while a CUDA graph is captured.

With few rows a product takes little longer than its launch, so q/k/v projections become one product
instead of three, and gate/up projections one instead of two. Their weights are placed in one tensor,
and each parameter becomes a view of its part. There is still one copy of the weights: the joined product
sees in-place updates, and scoring, updates and checkpoints use the usual modules.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that read the same input, by their usual names."""
ALIGNMENT = 16  # bytes to which each part must be aligned, for fast kernels


class Joined:
    """The joined linear layers of a model. Creating it moves weights, so create it before graphs hold
    their addresses. Weights that are joined already are not moved again.

    Example: joined = Joined(model); with joined.on(): capture()
    """

    def __init__(self, model: nn.Module) -> None:
        self.siblings = list(_find_siblings(model))
        moved = [_place(parts) for _, linears in self.siblings for parts in _tensors(linears)]
        if any(moved) and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the freed pieces are too small to be reused

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside the block the first of the siblings that is called computes the product for all."""
        try:
            for owner, linears in self.siblings:
                product, start = _Product(linears), 0
                for name, member in linears.items():
                    setattr(owner, name, _Part(member, product, start))
                    start += member.out_features
            yield
        finally:
            for owner, linears in self.siblings:
                for name, member in linears.items():
                    setattr(owner, name, member)


class _Product:
    """The joined weights, and the result between the first and the last call of the siblings."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        # Parameters, because torch.compile treats only their shapes as constants.
        whole = [nn.Parameter(_whole(p), requires_grad=False) for p in _tensors(linears)]
        self.weight, self.bias = whole[0], whole[1] if len(whole) > 1 else None
        self.members, self.left = len(linears), 0
        self.input: Any = None
        self.output: Any = None


class _Part(nn.Module):
    """Replaces one linear layer. One class for all layers, so that torch.compile compiles once."""

    def __init__(self, member: nn.Linear, product: _Product, start: int) -> None:
        super().__init__()
        self.weight, self.bias, self.product = member.weight, member.bias, product
        self.start, self.end = start, start + member.out_features

    def forward(self, input: Tensor) -> Tensor:
        shared = self.product
        if not shared.left:
            shared.input, shared.left = input, shared.members
            shared.output = linear(input, shared.weight, shared.bias)
        elif input is not shared.input:  # another input, as in cross-attention
            return linear(input, self.weight, self.bias)
        part: Tensor = shared.output[..., self.start : self.end]
        shared.left -= 1
        if not shared.left:
            shared.input = shared.output = None
        return part


def _find_siblings(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, nn.Linear]]]:
    """Modules and their linear layers that can be joined: plain, alike, and sharing no memory."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    holds = Counter(_storage(p) for p in model.parameters() if type(p) is nn.Parameter)
    for owner in model.modules():
        for names in SIBLINGS:
            linears: dict[str, Any] = {n: m for n in names if _is_plain(m := owner._modules.get(n))}
            if len(linears) == len(names) and _alike(list(linears.values())):
                tensors = _tensors(linears)
                alone = all(uses[id(p)] == holds[_storage(p)] == 1 for ps in tensors for p in ps)
                if alone or all(map(_is_contiguous, tensors)):
                    yield owner, linears


def _is_plain(module: nn.Module | None) -> bool:
    """Whether it is a torch Linear without adapter, hook, and quantised or sharded weights."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and all(type(p) is nn.Parameter for p in module.parameters())


def _alike(linears: Sequence[nn.Linear]) -> bool:
    weights = [m.weight for m in linears]
    kinds = {(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in linears}
    return len(kinds) == 1 and not any(len(w) * w.element_size() % ALIGNMENT for w in weights)


def _tensors(linears: dict[str, nn.Linear]) -> list[list[Tensor]]:
    """Weights, and biases if there are any."""
    biases: list[Tensor] = [m.bias for m in linears.values() if m.bias is not None]
    return [[m.weight for m in linears.values()], *([biases] if biases else [])]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_contiguous(parts: Sequence[Tensor]) -> bool:
    """Whether each part begins in memory where the previous one ends."""
    starts = [p.data_ptr() for p in parts]
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parts if p.is_contiguous()]
    return len({_storage(p) for p in parts}) == 1 and starts[1:] == ends[:-1]


def _place(parts: Sequence[Tensor]) -> bool:
    """Move the parts into one tensor. Returns False if they are in one already."""
    if _is_contiguous(parts):
        return False
    whole = torch.cat([p.data for p in parts])
    for part, piece in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = piece
    return True


def _whole(parts: Sequence[Tensor]) -> Tensor:
    _place(parts)  # again, if the model was moved to another device
    first = parts[0].data
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
