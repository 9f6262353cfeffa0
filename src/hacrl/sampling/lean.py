"""The common decoders without the library's wrappers, for small models on a CPU.

For a model of a few layers and some hundred rows, what the library does around the products (masks,
outputs, options, norms of seven operations) takes longer than they do. Most decoders are one scheme:
norm, attention with a rotary embedding, norm, gated product. Here the scheme is written out over the
model's own weights in as few operations as torch has for it. A part that is not the usual one (an
adapter, another norm) is called as it is. A model that is built otherwise, or for which the scheme
gives other logits than the model itself, is not served; nor is one in half precision, where that
could not be told.

Axis suffixes: N tokens in one line, H heads (those of queries, keys and values side by side), D head
size, E width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hacrl.policy.attention import CacheShape, ShapeFinder, Switch, attend, doing, rule_of
from hacrl.policy.fuse import GATED, ROTARY, is_gated
from hacrl.sampling.compatibility import reference_logits, relative_error, sample_ids
from hacrl.sampling.decode import next_logits, prefill
from hacrl.sampling.joined import is_plain

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ATTENTION = {*PROJECTIONS, "o_proj"}
NORMS = {"q_norm", "k_norm"}

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, [N, 1, D] each."""
Part = Callable[[Tensor], Tensor]


class LeanForward:
    """The passes of a sampler (decode.py). It holds the addresses of the weights: make one for a call
    of `sample`, not for longer.

    Example: lean = LeanForward(model) if fits(model) else None; lean(token_R, position_R)
    """

    @torch.no_grad()
    def __init__(self, model: Any, positions: int | None = None) -> None:
        """`positions`: the angles of so many are computed at once, where they do not depend on what
        else is in the batch."""
        self.embed, self.head = model.model.embed_tokens, model.lm_head
        self.rotary = model.model.rotary_emb
        self.norm = _norm(model.model.norm)
        rotate, self.signed = _rotation(model.model)
        self.layers = [_Layer(layer, rotate) for layer in model.model.layers]
        self._table: Angles | None = None
        if positions is not None:
            self._table = self._angles(torch.arange(positions))

    def __call__(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        """[R, V] after one more token a row."""
        angles = self._angles_at(position_R)
        with torch.inference_mode():
            x_RE = self._read(token_R, angles, token_R.shape[0])
            self.layers[-1].think(x_RE)
            logits_RV: Tensor = self.head(self.norm(x_RE))
        return logits_RV

    def fill(self, ids_BL: Tensor) -> None:
        """Prompts, padded on the right: only what attention stores is wanted."""
        rows, length = ids_BL.shape
        angles = self._angles_at(torch.arange(length).repeat(rows))
        with torch.inference_mode():
            self._read(ids_BL.flatten(), angles, rows)

    def _read(self, token_N: Tensor, angles: Angles, rows: int) -> Tensor:
        """All layers, up to the last one's attention."""
        x_NE: Tensor = self.embed(token_N)
        for layer in self.layers[:-1]:
            layer.attend(x_NE, angles, rows)
            layer.think(x_NE)
        self.layers[-1].attend(x_NE, angles, rows)
        return x_NE

    def _angles_at(self, position_N: Tensor) -> Angles:
        if self._table is None:
            return self._angles(position_N)
        cos, sin = self._table
        return cos.index_select(0, position_N), sin.index_select(0, position_N)

    def _angles(self, position_N: Tensor) -> Angles:
        # Not in inference mode: some rotary embeddings keep what they compute, for the trainer too.
        angles: Angles = self.rotary(self.embed.weight, position_N.unsqueeze(1))
        return _signed(angles) if self.signed else angles


class _Layer:
    def __init__(self, layer: Any, rotate: Callable[[Tensor, Angles], Tensor]) -> None:
        part, mlp = layer.self_attn, layer.mlp
        self.index, self.size, self.rotate = part.layer_idx, part.head_dim, rotate
        self.rule = rule_of(part, part.scaling, getattr(part, "sliding_window", None))
        self.norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.products = [_Product(getattr(part, name)) for name in PROJECTIONS]
        self.widths = [getattr(part, name).out_features for name in PROJECTIONS]
        self.queries, self.keys, _ = (width // self.size for width in self.widths)
        self.head_norms: list[Part] = []
        if "q_norm" in part._modules:
            self.head_norms = [_norm(part.q_norm), _norm(part.k_norm)]
        self.out = _Product(part.o_proj)
        self.gated: tuple[_Product, Part, _Product] | None = None
        self.last = _Product(mlp)
        if _only(mlp, GATED) and _known(mlp, lambda: is_gated(mlp)):
            self.gated = _Product(mlp.gate_proj), mlp.act_fn, _Product(mlp.up_proj)
            self.last = _Product(mlp.down_proj)

    def attend(self, x_NE: Tensor, angles: Angles, rows: int) -> None:
        """Adds attention's result to x, in place."""
        count, both = x_NE.shape[0], self.queries + self.keys
        normed_NE, joined = self.norms[0](x_NE), x_NE.new_empty(count, sum(self.widths))
        for product, out in zip(self.products, joined.split(self.widths, 1), strict=True):
            product.put(normed_NE, out)
        heads_NHD = joined.view(count, -1, self.size)
        turning_NHD, value_NHD = heads_NHD[:, :both], heads_NHD[:, both:]
        if self.head_norms:
            parts = turning_NHD.split([self.queries, self.keys], 1)
            normed = [norm(p) for norm, p in zip(self.head_norms, parts, strict=True)]
            turning_NHD = torch.cat(normed, 1)
        turned_NHD = self.rotate(turning_NHD, angles)
        query, key, value = (
            h.view(rows, -1, h.shape[1], self.size).transpose(1, 2)
            for h in (turned_NHD[:, : self.queries], turned_NHD[:, self.queries :], value_NHD)
        )
        result = attend(self.index, query, key, value, self.rule)
        self.out.add(result.reshape(count, -1), x_NE)

    def think(self, x_NE: Tensor) -> None:
        """Adds the gated product to x, in place."""
        normed_NE = self.norms[1](x_NE)
        if self.gated is not None:
            gate, activation, up = self.gated
            normed_NE = activation(gate(normed_NE)).mul_(up(normed_NE))
        self.last.add(normed_NE, x_NE)


class _Product:
    """A part whose result goes where it is wanted: in one operation where it is a plain product."""

    def __init__(self, part: Any) -> None:
        self.part = part
        plain = is_plain(part) and part.bias is None
        self.weight = part.weight.t() if plain else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            result: Tensor = self.part(x)
            return result
        return torch.mm(x, self.weight)

    def put(self, x: Tensor, out: Tensor) -> None:
        if self.weight is None:
            out.copy_(self.part(x))
        else:
            torch.mm(x, self.weight, out=out)

    def add(self, x: Tensor, total: Tensor) -> None:
        if self.weight is None:
            total += self.part(x)
        else:
            total.addmm_(x, self.weight)


def _norm(part: Any) -> Part:
    """The part, or if it is the usual norm that in one call."""
    epsilon = getattr(part, "variance_epsilon", None)
    if epsilon is None or not _only(part, {"weight"}) or part.weight.ndim > 1:
        return part
    weight = part.weight
    epsilon, share = weight.new_tensor(epsilon), 1 / len(weight)

    def usual(x: Tensor) -> Tensor:  # rms_norm is seven operations on a CPU
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(epsilon, norm, norm, value=share).rsqrt_()).mul_(weight)

    def same() -> bool:
        # So small that epsilon counts, and with a mean: some norms take it away.
        trial = torch.linspace(-1e-3, 2e-3, len(weight)).to(weight)
        return torch.allclose(usual(trial), part(trial), rtol=1e-5)

    return usual if _known(part, same) else part


def _rotation(decoder: Any) -> tuple[Callable[[Tensor, Angles], Tensor], bool]:
    """The model's rotary function for heads [N, H, D]; and whether it wants signed sines: the usual
    one, which turns the two halves of a head against each other, does."""
    part = decoder.layers[0].self_attn
    own = getattr(sys.modules[type(part).__module__], ROTARY)

    def models(heads_NHD: Tensor, angles: Angles) -> Tensor:
        heads_NH1D = heads_NHD.unsqueeze(2)  # as queries of one token; of keys it wants some, too
        turned_NH1D: Tensor = own(heads_NH1D, heads_NH1D[:, :1], *angles)[0]
        return turned_NH1D.squeeze(2)

    def same() -> bool:
        weight = decoder.embed_tokens.weight
        angles = decoder.rotary_emb(weight, torch.arange(1, 4).unsqueeze(1))
        trial = torch.linspace(-1, 1, 3 * part.head_dim).view(3, 1, -1).to(weight)
        with suppress(RuntimeError):  # only a part of a head is turned
            turned = _halves(trial, _signed(angles))
            return torch.allclose(turned, models(trial, angles), rtol=1e-5)
        return False

    return (_halves, True) if _known(part, same) else (models, False)


def _halves(heads_NHD: Tensor, angles: Angles) -> Tensor:
    cos_N1D, sin_N1D = angles
    swapped_NHD = heads_NHD.roll(heads_NHD.shape[2] // 2, 2)
    return (heads_NHD * cos_N1D).addcmul_(swapped_NHD, sin_N1D)


def _signed(angles: Angles) -> Angles:
    """The first half of a head gets minus the other, the second plus."""
    cos_N1D, sin_N1D = angles
    first, second = sin_N1D.chunk(2, 2)
    return cos_N1D, torch.cat([-first, second], 2)


_usual: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _known(part: nn.Module, same: Callable[[], bool]) -> bool:
    """Whether the part does what is usual: looked at once, since all of it is compared with the model's
    own logits (sampler.py). Of every part by itself: two of a class may be set otherwise, and what a
    model writes must not depend on who else was there before it."""
    if part not in _usual:
        _usual[part] = same()
    return _usual[part]


def _only(part: Any, names: Container[str]) -> bool:
    """It holds nothing but what has these names, and nobody would notice that it is not called. What
    else it held might add nothing at first (a bias of zeros), and be trained then."""
    return not (
        any(name not in names for name in (*part._parameters, *part._buffers, *part._modules))
        or part._forward_hooks
        or part._forward_pre_hooks
        or "forward" in vars(part)
    )


def fits(model: Any) -> bool:
    """Whether the parts are those of the scheme, and the wrappers left out hold no weights of their own
    and have no listeners."""
    decoder: Any = getattr(model, "model", None)
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or set(model._modules) != {"model", "lm_head"}:
        return False
    if set(decoder._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if getattr(model.config, "clip_qkv", None) is not None:  # seen only where weights are large
        return False
    attention: list[Any] = [layer._modules.get("self_attn", layer) for layer in layers]
    return (
        all(set(layer._modules) == LAYER for layer in layers)
        and all(set(part._modules) in (ATTENTION, ATTENTION | NORMS) for part in attention)
        and all(hasattr(sys.modules[type(part).__module__], ROTARY) for part in attention)
        and not any(
            wrapper._forward_hooks or wrapper._forward_pre_hooks or wrapper._parameters
            for wrapper in (model, decoder, *layers, *attention)
        )
    )


@torch.no_grad()
def reproduces_logits(model: Any, shape: CacheShape) -> bool:
    """Whether a lean step gives the model's logits, at the eighth position and at the last."""
    # In half precision rounding would hide real differences.
    if shape.dtype != torch.float32 or not fits(model):
        return False
    ids_1L = sample_ids(model)
    reference_V = reference_logits(model, ids_1L, "eager")
    final = (getattr(model.config, "max_position_embeddings", None) or 32768) - 1
    with suppress(AttributeError, RuntimeError, TypeError, ValueError, KeyError):
        lean = LeanForward(model)
        logits_V, finder = _trial(model, ids_1L, ids_1L.shape[1] - 1, lean)
        if relative_error(logits_V, reference_V) >= 1e-4 or finder.shape() != shape:
            return False
        own_V, theirs = _trial(model, ids_1L, final, None)
        logits_V, finder = _trial(model, ids_1L, final, lean)
        return relative_error(logits_V, own_V) < 1e-4 and finder.limits == theirs.limits
    return False


def _trial(
    model: Any, ids_1L: Tensor, position: int, lean: LeanForward | None
) -> tuple[Tensor, ShapeFinder]:
    finder, last = ShapeFinder(), ids_1L[:, -1]
    position_1 = torch.full_like(last, position)
    with Switch(model).on(), doing(finder):
        if lean is not None:
            lean.fill(ids_1L[:, :-1])
            return lean(last, position_1)[0], finder
        prefill(model, ids_1L[:, :-1])
        return next_logits(model, last, position_1)[0], finder
