"""Small operations compiled to one kernel each by torch.compile: norms, rotary embedding, gated product.

A layer has dozens of tiny kernels. For small models they are most of a captured decode step, and a
third of the time and a sixth of the memory of an update, because each keeps tensors for its backward; a
compiled one keeps only its inputs. Only modules that do not depend on their layer are compiled (one
compilation serves all layers), for any number of tokens.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROTARY = "apply_rotary_pos_emb"
"""Name of the rotary function in the Python module of nearly every decoder."""
WORTH_COMPILING = 50_000_000
"""Parameters from which on scoring and updates are compiled: a compilation takes seconds."""
RECOMPILE_LIMIT = 64
"""torch counts the variants of a function (model sizes, with or without gradient) over the whole process
and stops compiling after eight by default."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Fusion:
    """Compiled modules of a decode step, used while its graph is captured.

    Example: fusion = Fusion(model); with fusion.on(): capture()
    """

    def __init__(self, model: nn.Module, compiler: Compiler | None = None) -> None:
        self._compiler = compiler or _compile
        self._compiled: dict[Any, Any] = {}
        self.parts = list(_parts(model))
        self.rotary = _rotary(model)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The model uses the compiled modules and rotary functions inside the block."""
        forward = self._forwards()
        before = {source: getattr(source, ROTARY) for source in self.rotary}
        for source, function in self._rotaries().items():
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

    def _forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        return {part: self._fused(type(part).forward).__get__(part) for part in self.parts}

    def _rotaries(self) -> dict[Any, Callable[..., Any]]:
        return {source: self._fused(function) for source, function in self.rotary.items()}

    def _fused(self, function: Any) -> Any:
        if function not in self._compiled:
            self._compiled[function] = self._compiler(function)
        return self._compiled[function]


def worth_fusing(model: nn.Module) -> bool:
    """Whether to compile for scoring and updates: a model in half precision on a GPU, large enough to
    pay for the compilation, and not sharded (its tensors are DTensors)."""
    weights = list(model.parameters())
    return (
        all(w.is_cuda and type(w.data) is Tensor for w in weights)
        and weights[0].dtype.itemsize == 2
        and sum(w.numel() for w in weights) >= WORTH_COMPILING
    )


class LearningFusion(Fusion):
    """Compiled modules of scoring and updates, forward and backward. Matrix products are not compiled.

    Example: fusion = LearningFusion(model); with fusion.on(): model(ids)
    """

    def __init__(self, model: nn.Module, compiler: Compiler | None = None) -> None:
        super().__init__(model, compiler)
        self.parts = [part for part in self.parts if not _has_matrix(part)]
        self._forward = super()._forwards()
        products: dict[Any, Any] = {}
        for module in model.modules():
            if is_gated(module):
                activation = module.act_fn
                kind = type(activation) if isinstance(activation, nn.Module) else activation
                if kind not in products:
                    products[kind] = self._fused(partial(_product, activation))
                self._forward[module] = partial(_gated, module, products[kind])
        self._rotary = {s: _token_first(f, self._fused(f)) for s, f in self.rotary.items()}

    def _forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        return self._forward

    def _rotaries(self) -> dict[Any, Callable[..., Any]]:
        return self._rotary


def _token_first(rotary: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled rotary function on axes batch, token, head, size. Models call it with head before
    token, which is not the order in memory: compiled code then copies the gradients of queries and keys
    twice, into the order of the axes and back."""
    if "unsqueeze_dim" not in inspect.signature(rotary).parameters:
        return compiled

    def transposed(*given: Any, **named: Any) -> Any:
        if named or len(given) != 4:  # an unusual call
            return compiled(*given, **named)
        query, key, cos, sin = given
        found = compiled(query.transpose(1, 2), key.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        return tuple(t.transpose(1, 2) for t in found)

    return transposed


def _rotary(model: nn.Module) -> dict[Any, Callable[..., Any]]:
    """The rotary functions of a model, by the Python module that contains them."""
    sources = {sys.modules[type(m).__module__] for m in model.modules() if _is_attention(m)}
    return {source: getattr(source, ROTARY) for source in sources if hasattr(source, ROTARY)}


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any number of tokens."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
    return torch.compile(function, dynamic=True)


def _has_matrix(part: nn.Module) -> bool:
    """Whether it has a weight matrix, like linear layers, experts and routers."""
    return any(p.ndim > 1 for p in part.parameters())


def _product(activation: Any, gate: Tensor, up: Tensor) -> Tensor:
    result: Tensor = activation(gate) * up
    return result


def _gated(module: Any, product: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    result: Tensor = module.down_proj(product(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


@torch.no_grad()
def is_gated(module: Any) -> bool:
    """Whether it is the usual gated MLP, by attribute names and by its output (on the meta device, where
    tensors have no values, by names only)."""
    if not all(hasattr(module, name) for name in GATED):
        return False
    if any(name not in GATED for name in (*module._parameters, *module._buffers, *module._modules)):
        return False  # e.g. a bias of zeros, which does not show in the output before training
    weight = getattr(module.gate_proj, "weight", None)
    if weight is None or weight.ndim != 2 or "forward" in vars(module):
        return False
    activation = module.act_fn  # a module or a function
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return False
    if weight.is_meta:
        return True
    hidden = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device)
    hidden = hidden.view(1, 2, -1)
    try:
        own = module(hidden)
    except (TypeError, ValueError, RuntimeError):  # another signature
        return False
    found = _gated(module, partial(_product, activation), hidden)
    return isinstance(own, Tensor) and torch.equal(own, found)


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx")


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of the layers without attention, other than single linear layers (their
    kernels cannot be improved). Modules with adapters are left out."""
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
