"""Backward of `Copies` (packing.py): sums the gradients of each row's copies in a fixed order.

Axis suffixes: N rows, F copies of them, W elements of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _sum_kernel(gradient, start, copy, total, width, BLOCK: tl.constexpr):
    """A block of one row: the sum over its copies, in float32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    found = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(start + row), tl.load(start + row + 1)):
        place = tl.load(copy + i) * width + at
        found += tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * width + at, found.to(total.dtype.element_ty), mask=inside)


def sum_of_copies(gradient_FW: Tensor, start: Tensor, copy_F: Tensor) -> Tensor:
    """[N, W]. The copies of row n are `copy_F[start[n]:start[n + 1]]`."""
    rows, width = len(start) - 1, gradient_FW.shape[1]
    total_NW = gradient_FW.new_empty((rows, width))
    with torch.cuda.device_of(gradient_FW):  # Triton launches on the current GPU
        _sum_kernel[(rows, triton.cdiv(width, BLOCK))](
            gradient_FW, start, copy_F, total_NW, width, BLOCK=BLOCK, num_warps=4
        )
    return total_NW
