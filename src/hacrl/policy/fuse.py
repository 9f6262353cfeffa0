"""Small operations of a decode step made one kernel each, while a graph is being captured.

A layer's norms, rotary embedding and gated product are dozens of tiny kernels, and for small models
they take most of a captured step. torch.compile fuses them. Only parts that do not know their layer
are compiled (one compilation serves all layers), once, for any number of rows, and only inside the
capture: scoring and updates keep the library's own forward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

ROTARY = "apply_rotary_pos_emb"
"""The function of that name in a model's own module, as nearly all decoders have it."""


class Fusion:
    """The compiled parts of a model.

    Example: fusion = Fusion(model); with fusion.on(): capture()
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts = list(_parts(model))
        sources = {sys.modules[type(m).__module__] for m in model.modules() if _is_attention(m)}
        self.sources = [s for s in sources if hasattr(s, ROTARY)]
        self._compiled: dict[Any, Any] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        rotary = [getattr(source, ROTARY) for source in self.sources]
        for source, function in zip(self.sources, rotary, strict=True):
            setattr(source, ROTARY, self._fused(function))
        for part in self.parts:
            part.forward = self._fused(type(part).forward).__get__(part)
        try:
            yield
        finally:
            for part in self.parts:
                del part.forward
            for source, function in zip(self.sources, rotary, strict=True):
                setattr(source, ROTARY, function)

    def _fused(self, function: Any) -> Any:
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=True)
        return self._compiled[function]


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
