"""Small operations made one kernel each by torch.compile: norms, rotary embedding, gated product.

In a layer they are dozens of tiny kernels. For small models they take most of a captured decode step,
and of an update a third of the time and a sixth of the memory, since each keeps what its backward
needs; fused they keep their inputs. Only parts that do not know their layer are compiled (one
compilation serves all layers), for any number of tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROTARY = "apply_rotary_pos_emb"
"""The function of that name in a model's own module, as nearly all decoders have it."""
WORTH_COMPILING = 50_000_000
"""Parameters of a model from which on scoring and updates are fused: a compilation takes seconds."""
RECOMPILE_LIMIT = 64
"""torch counts the forms of one function (sizes of models, with gradient or without) over a whole
process, and after eight of them leaves the next as they are."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function one kernel."""


class Fusion:
    """The compiled parts of a model in a decode step, while its graph is being captured.

    Example: fusion = Fusion(model); with fusion.on(): capture()
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts = list(_parts(model))
        self.rotary = _rotary(model)
        self._compiled: dict[Any, Any] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        forward = {part: self._fused(type(part).forward).__get__(part) for part in self.parts}
        with _instead(forward, {s: self._fused(f) for s, f in self.rotary.items()}):
            yield

    def _fused(self, function: Any) -> Any:
        if function not in self._compiled:
            self._compiled[function] = _compile(function)
        return self._compiled[function]


def worth_fusing(model: nn.Module) -> bool:
    """Whether scoring and updates of the model are fused: where time is spent on small kernels, in half
    precision on a GPU, and enough of it. Not for shards, whose tensors are of another kind."""
    weights = list(model.parameters())
    return (
        all(w.is_cuda and type(w.data) is Tensor for w in weights)
        and weights[0].dtype.itemsize == 2
        and sum(w.numel() for w in weights) >= WORTH_COMPILING
    )


class LearningFusion:
    """The compiled parts of a model in scoring and updates, forward and backward.

    Matrix products stay outside, where a draft keeps their results (reuse.py).

    Example: fusion = LearningFusion(model); with fusion.on(): model(ids)
    """

    def __init__(self, model: nn.Module, compiler: Compiler | None = None) -> None:
        self._compiler = compiler or _compile
        self._compiled: dict[Any, Any] = {}
        self._forward: dict[nn.Module, Callable[..., Any]] = {}
        for part in _parts(model):
            if not _multiplies(part):
                self._forward[part] = self._fused(type(part).forward).__get__(part)
        products: dict[Any, Any] = {}
        for module in model.modules():
            if is_gated(module):
                activation = module.act_fn
                kind = type(activation) if isinstance(activation, nn.Module) else activation
                if kind not in products:
                    products[kind] = self._fused(partial(_product, activation))
                self._forward[module] = partial(_gated, module, products[kind])
        self._rotary = {s: _token_first(f, self._fused(f)) for s, f in _rotary(model).items()}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with _instead(self._forward, self._rotary):
            yield

    def _fused(self, function: Any) -> Any:
        if function not in self._compiled:
            self._compiled[function] = self._compiler(function)
        return self._compiled[function]


def _token_first(rotary: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Called as models call it, with axes batch, head, token, size, but working on memory as it lies,
    token by token. Compiled code wants gradients to lie as its results' axes do: else it would copy
    those of queries and keys on their way in, and what stands before it on their way out."""
    if "unsqueeze_dim" not in inspect.signature(rotary).parameters:
        return compiled

    def turned(*given: Any, **named: Any) -> Any:
        if named or len(given) != 4:  # in a way of the model's own
            return compiled(*given, **named)
        query, key, cos, sin = given
        query, key = (t.transpose(1, 2) for t in (query, key))
        found = compiled(query, key, cos, sin, unsqueeze_dim=2)
        return tuple(t.transpose(1, 2) for t in found)

    return turned


def _rotary(model: nn.Module) -> dict[Any, Callable[..., Any]]:
    """The rotary functions of a model, by the Python module that holds them."""
    sources = {sys.modules[type(m).__module__] for m in model.modules() if _is_attention(m)}
    return {source: getattr(source, ROTARY) for source in sources if hasattr(source, ROTARY)}


@contextlib.contextmanager
def _instead(
    forward: Mapping[nn.Module, Callable[..., Any]], rotary: Mapping[Any, Callable[..., Any]]
) -> Iterator[None]:
    """Parts work by these forwards, and Python modules by these rotary functions, for a while."""
    before = {source: getattr(source, ROTARY) for source in rotary}
    for source, function in rotary.items():
        setattr(source, ROTARY, function)
    for part, function in forward.items():
        part.forward = function
    try:
        yield
    finally:
        for part in forward:
            del part.forward
        for source, function in before.items():
            setattr(source, ROTARY, function)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of tokens."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
    return torch.compile(function, dynamic=True)


def _multiplies(part: nn.Module) -> bool:
    """Whether it holds a matrix: besides linear layers, experts and routers do."""
    return any(p.ndim > 1 for p in part.parameters())


def _product(activation: Any, gate: Tensor, up: Tensor) -> Tensor:
    result: Tensor = activation(gate) * up
    return result


def _gated(module: Any, product: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    result: Tensor = module.down_proj(product(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


@torch.no_grad()
def is_gated(module: Any) -> bool:
    """Whether it is the usual gated product, by name and by what it gives (on the meta device tensors
    have no values: by name)."""
    if not all(hasattr(module, name) for name in GATED):
        return False
    if any(name not in GATED for name in (*module._parameters, *module._buffers, *module._modules)):
        return False  # a bias of zeros gives nothing yet, and would be trained
    weight = getattr(module.gate_proj, "weight", None)
    if weight is None or weight.ndim != 2 or "forward" in vars(module):
        return False
    activation = module.act_fn  # a module or a plain function
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return False
    if weight.is_meta:
        return True
    hidden = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device)
    hidden = hidden.view(1, 2, -1)
    try:
        own = module(hidden)
    except (TypeError, ValueError, RuntimeError):  # it takes something else
        return False
    found = _gated(module, partial(_product, activation), hidden)
    return isinstance(own, Tensor) and torch.equal(own, found)


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx")


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules of the layers that neither are nor hold attention, and are no single product
    (the library's kernels for those are as good as it gets). Adapters stay as they are."""
    found: set[int] = set()
    for module in model.modules():
        if any(_is_attention(m) for m in module.modules()) and not _is_attention(module):
            candidates = list(module.children())
        elif _is_attention(module):
            candidates = [m for m in module.children() if not isinstance(m, nn.Linear)]
        else:
            continue
        for part in candidates:
            if id(part) in found or not _fusible(part):
                continue
            found.add(id(part))
            yield part


def _fusible(module: nn.Module) -> bool:
    inner = list(module.modules())
    if isinstance(module, (nn.Linear, nn.Embedding, nn.ModuleList, nn.Identity)):
        return False
    if any(_is_attention(m) or isinstance(m, nn.Embedding) for m in inner):
        return False
    if "forward" in vars(module) or "Rotary" in type(module).__name__:
        return False
    return not any("lora" in name for name, _ in module.named_parameters())
