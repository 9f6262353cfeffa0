"""Log-probabilities of given tokens from hidden states, without all logits at once.

    log p = z[target] / T - logsumexp(z / T),   z = W h + b

The forward keeps only logsumexp, one number per token. The backward computes the logits of a chunk
again and turns them in place into the derivative by the logits, (1[target] - p) / T times the incoming
gradient. Both of its matrix products use that chunk, so the peak is one chunk for any vocabulary. The
backward skips tokens whose incoming gradient is exactly zero, unless the forward was skipped: those
tokens are survivors, and selecting among them would wait for the GPU.

Axis suffixes: N tokens, n tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Memory limit for a chunk's logits and the temporaries made from them: small chunks fit a CPU's caches,
large ones keep a GPU busy."""


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature: float,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """log p of each target (differentiable) and logsumexp (not), both float32. If they are `known` from
    an earlier pass they are not computed again."""
    return _Head.apply(hidden_ND, weight_VD, bias_V, target_N, temperature, known)


def logits_logprobs(
    logits_NV: Tensor, target_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same from full logits, for models whose head is not a plain matrix product."""
    scaled_NV = logits_NV.float() / temperature
    lse_N = scaled_NV.logsumexp(1)
    return scaled_NV.gather(1, target_N.unsqueeze(1)).squeeze(1) - lse_N, lse_N.detach()


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        logprob_N, lse_N = known or _chunked(hidden_ND, weight_VD, bias_V, target_N, temperature)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N)
        ctx.temperature, ctx.was_known = temperature, known is not None
        ctx.mark_non_differentiable(lse_N)
        return logprob_N, lse_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, lse_N = ctx.saved_tensors
        gradient_N = gradient_N.contiguous()
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden_ND = torch.zeros_like(hidden_ND) if wants_hidden else None
        total = _Total(weight_VD) if wants_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        for kept_n in _chunks(gradient_N, chunk_tokens(weight_VD), ctx.was_known):
            hidden_nD = hidden_ND[kept_n]
            slope_nV = _slope(
                linear(hidden_nD, weight_VD, bias_V),
                target_N[kept_n],
                lse_N[kept_n],
                gradient_N[kept_n],
                ctx.temperature,
            )
            if d_hidden_ND is not None:
                d_hidden_ND[kept_n] = slope_nV @ weight_VD
            if total is not None:
                total.add(slope_nV, hidden_nD)
            if d_bias_V is not None:
                d_bias_V += slope_nV.float().sum(0)
        return (
            d_hidden_ND,
            total.value() if total is not None else None,
            d_bias_V.to(bias_V.dtype) if d_bias_V is not None else None,
            None,
            None,
            None,
        )


def _chunks(gradient_N: Tensor, size: int, whole: bool) -> Iterator[Tensor | slice]:
    """Tokens of the backward, `size` at a time: all if `whole`, otherwise those with a gradient."""
    if whole:
        for first in range(0, len(gradient_N), size):
            yield slice(first, first + size)
    elif len(kept_N := gradient_N.nonzero().squeeze(1)):
        yield from kept_N.split(size)


def _chunked(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """log p and logsumexp, chunk by chunk."""
    lse_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
    chosen_N = torch.empty_like(lse_N)
    size = chunk_tokens(weight_VD)
    for first in range(0, len(hidden_ND), size):
        part = slice(first, first + size)
        logits_nV = linear(hidden_ND[part], weight_VD, bias_V)
        lse_N[part], chosen_N[part] = _summary(logits_nV, target_N[part], temperature)
    return chosen_N.sub_(lse_N), lse_N


class _Total:
    """The sum over chunks of slope^T hidden, in float32 if there are several."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD
        self.sum_VD: Tensor | None = None

    def add(self, slope_nV: Tensor, hidden_nD: Tensor) -> None:
        if self.sum_VD is None:
            self.sum_VD = slope_nV.t() @ hidden_nD
        elif self.sum_VD.dtype == slope_nV.dtype == torch.float32:
            self.sum_VD.addmm_(slope_nV.t(), hidden_nD)
        else:
            self.sum_VD = self.sum_VD.float().add_(slope_nV.t() @ hidden_nD)

    def value(self) -> Tensor:
        if self.sum_VD is None:
            return torch.zeros_like(self.weight_VD)
        return self.sum_VD.to(self.weight_VD.dtype)


def chunk_tokens(weight_VD: Tensor) -> int:
    """Tokens of one chunk."""
    width = weight_VD.element_size()
    if not _fused(weight_VD):
        width += 8  # the float32 copy and logsumexp's temporary
    return max(1, CHUNK_BYTES[weight_VD.device.type] // (width * weight_VD.shape[0]))


def _summary(logits_nV: Tensor, target_n: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logsumexp(z / T) and z[target] / T."""
    if _fused(logits_nV):
        from hacrl.policy.head_kernels import summary

        return summary(logits_nV, target_n, temperature)
    scaled_nV = logits_nV.float() / temperature
    return scaled_nV.logsumexp(1), scaled_nV.gather(1, target_n.unsqueeze(1)).squeeze(1)


def _slope(
    logits_nV: Tensor, target_n: Tensor, lse_n: Tensor, gradient_n: Tensor, temperature: float
) -> Tensor:
    """The derivative of the loss by the logits, in their dtype."""
    if _fused(logits_nV):
        from hacrl.policy.head_kernels import slope_

        return slope_(logits_nV, target_n, lse_n, gradient_n, temperature)
    scale_n1 = (gradient_n / temperature).unsqueeze(1)
    slope_nV = logits_nV.float().div_(temperature).sub_(lse_n.unsqueeze(1)).exp_().mul_(-scale_n1)
    return slope_nV.scatter_add_(1, target_n.unsqueeze(1), scale_n1).to(logits_nV.dtype)


def _fused(tensor: Tensor) -> bool:
    """Whether to use the kernels: they read the logits once and make no float32 copies."""
    return tensor.is_cuda and has_triton()


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
