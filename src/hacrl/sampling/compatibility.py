"""Check whether the built-in KV cache reproduces a model's logits.

The built-in cache replaces attention in transformers' interface (policy/attention.py). It cannot serve
models with another attention, or with layers that keep other state than keys and values. Both are
found by comparing one decode step with a plain forward pass.
"""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hacrl.policy.attention import CacheShape, ShapeFinder, Switch
from hacrl.sampling.cache import prefill
from hacrl.sampling.decode import next_logits

MAX_ERROR_FLOAT32 = 1e-4
MAX_ERROR_HALF = 0.05
"""Largest relative error of the logits in half precision. Rounding gives 0.02 for random weights of
0.6B parameters and 0.045 for 4B; a cache that loses a token gives 0.17 or more, even at 1M."""
MAX_ERROR_MEASURED = 0.15
"""Upper bound where transformers' own attention kernels differ from each other by more than that."""


@torch.no_grad()
def find_cache_shape(model: Any) -> CacheShape | None:
    """Shape of the model's keys and values, or None (with a warning if logits differ) if the built-in
    cache does not fit the model."""
    words = model.get_input_embeddings().weight.shape[0]
    ids_1L = (torch.arange(8, device=model.device) * 7 % words).unsqueeze(0)
    # The reference is eager attention where possible: other kernels omit features such as score caps.
    reference_V = _reference_logits(model, ids_1L, "eager")
    finder, last = ShapeFinder(), ids_1L[:, -1]
    try:
        with Switch(model).on():
            prefill(model, ids_1L[:, :-1], finder)
            position_1 = torch.full_like(last, ids_1L.shape[1] - 1)
            logits_V = next_logits(model, last, position_1, finder)[0]
    except (AttributeError, TypeError, KeyError):
        return None
    error = _relative_error(logits_V, reference_V)
    half = logits_V.dtype != torch.float32
    allowed = MAX_ERROR_HALF if half else MAX_ERROR_FLOAT32
    if half and error >= allowed:
        rounding = _relative_error(_reference_logits(model, ids_1L, "sdpa"), reference_V)
        allowed = min(max(allowed, 2 * rounding), MAX_ERROR_MEASURED)
    if error < allowed:
        return finder.shape()
    warnings.warn(
        f"built-in KV cache disabled for this model (relative logit error {error:.2g} > "
        f"{allowed:.2g}); using transformers' cache, several times slower. This is expected for layers "
        "with state other than keys and values; for a model with plain attention, please report it.",
        stacklevel=2,
    )
    return None


def _reference_logits(model: Any, ids_1L: Tensor, attention: str) -> Tensor:
    """Logits [V] of the last token by a plain forward, with this attention if it can be chosen."""
    choosable = bool(getattr(model, "_supports_attention_backend", False))
    with Switch(model).on(attention) if choosable else nullcontext():
        logits = model(input_ids=ids_1L, use_cache=False, logits_to_keep=1).logits
    last_V: Tensor = logits[0, -1].float()
    return last_V


def _relative_error(logits_V: Tensor, reference_V: Tensor) -> float:
    return ((logits_V.float() - reference_V).norm() / reference_V.norm()).item()
