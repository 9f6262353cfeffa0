"""Pieces that several algorithms share. Axis suffixes: B sequences, T reply tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.types import Batch, Group, Status, Trajectory

SMALL = 1e-6
"""Added to the standard deviation (eq. 6)."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation with ddof 1; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return (sum((v - centre) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def advantage(reward: float, baseline: float, rewards: Sequence[float]) -> float:
    """(R - baseline) / (std + 1e-6); 0 where all rewards are equal or fewer than two were judged."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return 0.0
    return (reward - baseline) / (deviation(rewards) + SMALL)


def successes(group: Group, agent: str) -> tuple[int, int]:
    """How many of the agent's replies to the problem are right (status OK), of how many judged."""
    found = [t.verdict.status for t in group.judged if t.agent == agent and t.verdict]
    return found.count(Status.OK), len(found)


def is_right(reply: Trajectory) -> bool:
    return reply.verdict is not None and reply.verdict.status is Status.OK


def all_failed(group: Group, agent: str) -> bool:
    """Something of the agent was judged and nothing was right."""
    right, judged = successes(group, agent)
    return judged > 0 and right == 0


def sequence_ratio(batch: Batch) -> Tensor:
    """s = exp(mean_k log pi_k(y) - mean_j log pi_j,old(y)), each mean over its own tokens (eq. 11)."""
    return torch.exp(batch.mean_logprob_B - batch.behaviour_B)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(s A, clip(s, 1 - low, 1 + high) A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clip_leaves(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Where the clipped objective still has a gradient: not where the clip wins the min."""
    lost = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return ~lost


def kl_to_start(batch: Batch) -> Tensor:
    """Mean over the minibatch's own samples of the mean over tokens of k3 >= 0 (this micro-batch's
    share of it). k3 = r - log r - 1 with r = pi_start / pi, an unbiased estimate of the KL."""
    assert batch.ref_logprobs_BT is not None
    log_r_BT = (batch.ref_logprobs_BT - batch.logprobs_BT) * batch.mask_BT
    k3_BT = (torch.exp(log_r_BT) - log_r_BT - 1) * batch.mask_BT
    k3_B = k3_BT.sum(1) / batch.mask_BT.sum(1)
    return (k3_B * batch.is_own_B).sum() / max(batch.num_own, 1)


def add_kl(loss: Tensor, batch: Batch, beta: float) -> tuple[Tensor, Tensor | float]:
    """loss + beta * KL, and the KL by itself; both unchanged where the term is off."""
    if batch.ref_logprobs_BT is None:
        return loss, 0.0
    kl = kl_to_start(batch)
    return loss + beta * kl, kl.detach()
