"""Counter-based random numbers without generator state.

A noise stream is named by (seed, agent, step, problem, sample index). The noise of a token is a hash of
the stream's key, the token's position in the reply and the word. So a reply does not depend on the
order of requests, on batching, or on other agents.

Axis suffixes: B rows, V words.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _hash64(*parts: object) -> int:
    """64-bit hash of the parts and their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little", signed=True)


def stream_key(seed: int, agent: str, step: int, problem_id: str, index: int) -> int:
    """Key of one sample's noise stream."""
    return _hash64("sample", seed, agent, step, problem_id, index)


def order_key(seed: int, step: int, problem_id: str) -> int:
    """Sort key that shuffles the problems of a step, identically for every agent."""
    return _hash64("order", seed, step, problem_id)


def _mix_(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place. The masks turn arithmetic shifts into logical ones."""
    x ^= (x >> 30).bitwise_and_((1 << 34) - 1)
    x *= _MIX1
    x ^= (x >> 27).bitwise_and_((1 << 37) - 1)
    x *= _MIX2
    x ^= (x >> 31).bitwise_and_((1 << 33) - 1)
    return x


def exponential_noise(keys_B: Tensor, positions_B: Tensor, words: int) -> Tensor:
    """Standard exponential noise [B, V] for position `positions_B` of the streams `keys_B`.

    argmin(noise / p) is an exact draw from p. The uniform u keeps full resolution near 0, and
    -log1p(-u) keeps the lower tail, which decides the argmin, exact in float32.
    """
    import torch

    row_B1 = _mix_(keys_B + (positions_B + 1) * _GOLDEN).unsqueeze(1)
    word_V = torch.arange(1, words + 1, device=keys_B.device, dtype=torch.int64) * _GOLDEN
    bits_BV = _mix_(row_B1 + word_V).bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    uniform_BV = bits_BV.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform_BV.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
