"""Shared maths. Axis suffixes: B sequences, T reply tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hacrl.types import Group, MicroBatch, Status, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

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
    """The number of the agent's right replies to the problem (status OK), and of its judged ones."""
    found = [t.verdict.status for t in group.judged if t.agent == agent and t.verdict]
    return found.count(Status.OK), len(found)


def is_right(reply: Trajectory) -> bool:
    return reply.verdict is not None and reply.verdict.status is Status.OK


def all_failed(group: Group, agent: str) -> bool:
    """Whether replies of the agent were judged and none is right."""
    right, judged = successes(group, agent)
    return judged > 0 and right == 0


def sequence_ratio(batch: MicroBatch) -> Tensor:
    """s = exp(mean_k log pi_k(y) - mean_j log pi_j,old(y)), each mean over its own tokens (eq. 11)."""
    return (batch.mean_logprob_B - batch.behaviour_B).exp()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(s A, clip(s, 1 - low, 1 + high) A)."""
    return (ratio * advantage).minimum(ratio.clamp(1 - low, 1 + high) * advantage)


def clip_leaves(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Where the clipped objective has a gradient: where min() does not choose the clipped term."""
    lost = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return ~lost


def kl_to_start(batch: MicroBatch) -> Tensor:
    """This micro-batch's part of the KL to the start weights: a mean over the minibatch's own samples
    of the mean over tokens of k3 = r - log r - 1 >= 0 with r = pi_start / pi, an unbiased estimate."""
    assert batch.ref_logprobs_BT is not None
    log_r_BT = (batch.ref_logprobs_BT - batch.logprobs_BT) * batch.mask_BT
    k3_BT = (log_r_BT.exp() - log_r_BT - 1) * batch.mask_BT
    k3_B = k3_BT.sum(1) / batch.mask_BT.sum(1)
    return (k3_B * batch.is_own_B).sum() / max(batch.num_own, 1)


def add_kl(loss: Tensor, batch: MicroBatch, beta: float) -> tuple[Tensor, Tensor | float]:
    """Return loss + beta * KL and the KL. Without start log-probabilities: the loss as given and 0."""
    if batch.ref_logprobs_BT is None:
        return loss, 0.0
    kl = kl_to_start(batch)
    return loss + beta * kl, kl.detach()
