"""Log-probabilities of given tokens from hidden states, without all logits at once.

    log p = z[target] / T - logsumexp(z / T),   z = W h + b

The forward keeps only logsumexp, one number per token. The backward computes the logits of a chunk
again and turns them in place into the derivative by the logits, (1[target] - p) / T times the incoming
gradient. Both of its matrix products use that chunk, so the peak is one chunk for any vocabulary. The
backward skips tokens whose incoming gradient is exactly zero.

Axis suffixes: N tokens, n tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

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
) -> Tensor:
    """log p of each target in float32, differentiable by hidden states, weight and bias."""
    found: Tensor = _Head.apply(hidden_ND, weight_VD, bias_V, target_N, temperature)
    return found


def logits_logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """The same from full logits, for models whose head is not a plain matrix product."""
    scaled_NV = logits_NV.float() / temperature
    return scaled_NV.gather(1, target_N.unsqueeze(1)).squeeze(1) - scaled_NV.logsumexp(1)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
    ) -> Tensor:
        lse_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        chosen_N = torch.empty_like(lse_N)
        size = chunk_tokens(weight_VD)
        for first in range(0, len(hidden_ND), size):
            part = slice(first, first + size)
            logits_nV = linear(hidden_ND[part], weight_VD, bias_V)
            lse_N[part], chosen_N[part] = _summary(logits_nV, target_N[part], temperature)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N)
        ctx.temperature = temperature
        return chosen_N.sub_(lse_N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, lse_N = ctx.saved_tensors
        gradient_N = gradient_N.contiguous()
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden_ND = torch.zeros_like(hidden_ND) if wants_hidden else None
        d_weight_VD: Tensor | None = None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        kept_N = gradient_N.nonzero().squeeze(1)
        for kept_n in kept_N.split(chunk_tokens(weight_VD)) if len(kept_N) else ():
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
            if wants_weight:  # several chunks are summed in float32
                part_VD = slope_nV.t() @ hidden_nD
                d_weight_VD = part_VD if d_weight_VD is None else d_weight_VD.float().add_(part_VD)
            if d_bias_V is not None:
                d_bias_V += slope_nV.float().sum(0)
        if wants_weight and d_weight_VD is None:  # no token has a gradient
            d_weight_VD = torch.zeros_like(weight_VD)
        return (
            d_hidden_ND,
            d_weight_VD.to(weight_VD.dtype) if d_weight_VD is not None else None,
            d_bias_V.to(bias_V.dtype) if d_bias_V is not None else None,
            None,
            None,
        )


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
    return tensor.is_cuda
