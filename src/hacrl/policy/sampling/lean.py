"""A decode step of the common decoders without the library's wrappers, for small models on a CPU.

For a model of a few layers and some hundred rows, what the library does around the layers (masks,
outputs, options, captures) takes as long as the products. Most decoders are one scheme: norm,
attention with a rotary embedding, norm, gated product. Here the scheme is written out over the
model's own norms, projections and rotary function, adapters included. A model that is built
otherwise, or for which the scheme gives other logits than the model itself, is not served; nor is one
in half precision, where that could not be told.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.policy.attention import cached_attention
from hacrl.policy.fuse import ROTARY

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}


class LeanForward:
    """Calls like `next_logits`, the model given before.

    Example: lean = LeanForward(model) if fits(model) else None; lean(token_R, position_R)
    """

    def __init__(self, model: Any) -> None:
        self.decoder, self.head = model.model, model.lm_head
        self.rotate = getattr(
            sys.modules[type(self.decoder.layers[0].self_attn).__module__], ROTARY
        )

    def __call__(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        """[R, V] after one more token a row."""
        x = self.decoder.embed_tokens(token_R)
        # Not in inference mode: some rotary embeddings keep what they compute, for the trainer too.
        return self._layers(x, *self.decoder.rotary_emb(x, position_R.unsqueeze(1)))

    @torch.inference_mode()
    def _layers(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.decoder.layers:
            x = x + self._attention(layer.self_attn, layer.input_layernorm(x), cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits_RV: Tensor = self.head(self.decoder.norm(x))
        return logits_RV

    def _attention(self, part: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (len(x), -1, 1, part.head_dim)  # rows, heads, one token
        query, key, value = (p(x).view(shape) for p in (part.q_proj, part.k_proj, part.v_proj))
        if "q_norm" in part._modules:
            query, key = part.q_norm(query), part.k_norm(key)
        query, key = self.rotate(query, key, cos, sin)
        window = getattr(part, "sliding_window", None)
        out, _ = cached_attention(part, query, key, value, None, part.scaling, window)
        projected: Tensor = part.o_proj(out.view(len(x), -1))
        return projected


def fits(model: Any) -> bool:
    """Whether the parts are those of the scheme, and nobody listens to the wrappers left out."""
    decoder: Any = getattr(model, "model", None)
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or set(model._modules) != {"model", "lm_head"}:
        return False
    if set(decoder._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    attention: list[Any] = [layer._modules.get("self_attn", layer) for layer in layers]
    return (
        all(set(layer._modules) == LAYER for layer in layers)
        and all(set(part._modules) in (ATTENTION, ATTENTION | NORMS) for part in attention)
        and all(hasattr(sys.modules[type(part).__module__], ROTARY) for part in attention)
        and not any(
            wrapper._forward_hooks or wrapper._forward_pre_hooks
            for wrapper in (model, decoder, *layers, *attention)
        )
    )
