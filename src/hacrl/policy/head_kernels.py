"""Triton kernels of head.py: each of its two passes over a chunk of logits reads the logits once.

Axis suffixes: n tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _summary_kernel(
    logits, target, lse, chosen, inverse, words, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One token: logsumexp with a running maximum, and the target's logit."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        z = tl.load(row + word, mask=word < words, other=float("-inf")).to(tl.float32) * inverse
        new = tl.maximum(top, z)
        # -inf - -inf would be nan; such a lane has no word yet, and its total is 0
        keep = tl.where(top == float("-inf"), 0.0, tl.exp(top - new))
        here = tl.where(z == float("-inf"), 0.0, tl.exp(z - new))
        total = total * keep + here
        top = new
    peak = tl.max(top, 0)
    whole = tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - peak)), 0)
    tl.store(lse + token, peak + tl.log(whole))
    word = tl.load(target + token)
    tl.store(chosen + token, tl.load(row + word).to(tl.float32) * inverse)


@triton.jit
def _slope_kernel(
    logits, target, lse, gradient, inverse, words, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Overwrite a block of one token's logits with (1[word = target] - p) * gradient / T."""
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + token * stride + word
    z = tl.load(at, mask=word < words, other=0.0).to(tl.float32) * inverse
    p = tl.exp(z - tl.load(lse + token))
    hit = tl.where(word == tl.load(target + token), 1.0, 0.0)
    slope = (hit - p) * (tl.load(gradient + token) * inverse)
    tl.store(at, slope.to(logits.dtype.element_ty), mask=word < words)


def summary(logits_nV: Tensor, target_n: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logsumexp(z / T) and z[target] / T, float32."""
    tokens, words = logits_nV.shape
    lse_n = torch.empty(tokens, dtype=torch.float32, device=logits_nV.device)
    chosen_n = torch.empty_like(lse_n)
    with torch.cuda.device_of(logits_nV):  # Triton launches on the current GPU
        _summary_kernel[(tokens,)](
            logits_nV, target_n, lse_n, chosen_n, 1 / temperature, words, logits_nV.stride(0),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return lse_n, chosen_n


def slope_(
    logits_nV: Tensor, target_n: Tensor, lse_n: Tensor, gradient_n: Tensor, temperature: float
) -> Tensor:
    """The derivative of the loss by the logits, written over the logits."""
    tokens, words = logits_nV.shape
    with torch.cuda.device_of(logits_nV):
        _slope_kernel[(tokens, triton.cdiv(words, BLOCK))](
            logits_nV, target_n, lse_n, gradient_n.contiguous(), 1 / temperature, words,
            logits_nV.stride(0), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return logits_nV
