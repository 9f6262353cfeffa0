"""Shared maths. Axis suffixes: B sequences, T reply tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hacrl.types import Group, LossOutput, MicroBatch, Trajectory, Update

if TYPE_CHECKING:
    from torch import Tensor

SMALL = 1e-6  # added to the standard deviation (eq. 6).
MAX_LOG_RATIO = 20.0
"""Upper bound of a log-ratio before exp: e^20 = 4.9e8. Ratios that train are near 1. Without a bound,
exp can be inf, and inf * 0 is nan. At the bound a ratio has no gradient."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation with ddof 1; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return (sum((v - centre) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def is_mixed(rewards: Sequence[float]) -> bool:
    """Whether two rewards differ. Other rewards give no signal."""
    return len(rewards) > 1 and min(rewards) != max(rewards)


def advantage(reward: float, baseline: float, rewards: Sequence[float]) -> float:
    """(R - baseline) / (std + 1e-6); 0 where all rewards are equal or fewer than two were judged."""
    if not is_mixed(rewards):
        return 0.0
    return (reward - baseline) / (deviation(rewards) + SMALL)


def successes(group: Group, agent: str) -> tuple[int, int]:
    """The number of the agent's right replies to the problem, and of its judged ones."""
    found = [t.is_right for t in group.judged if t.agent == agent]
    return sum(found), len(found)


def all_failed(group: Group, agent: str) -> bool:
    """Whether replies of the agent were judged and none is right."""
    right, judged = successes(group, agent)
    return judged > 0 and right == 0


def filter_reason(reply: Trajectory, group: Group, learner: str, peers: str) -> str | None:
    """Why `algorithm.peers` leaves a peer's judged reply out: "failure", "success" or "not_failed" (not
    all of the learner's replies failed). None: it stays."""
    if peers == "successes" and not reply.is_right:
        return "failure"
    if peers == "failures" and reply.is_right:
        return "success"
    if peers == "where_i_failed" and not all_failed(group, learner):
        return "not_failed"
    return None


def sequence_ratio(batch: MicroBatch) -> Tensor:
    """s = exp(mean_k log pi_k(y) - mean_j log pi_j,old(y)), each mean over its own tokens (eq. 11)."""
    return bounded_exp(batch.mean_logprob_B - batch.behaviour_B)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(min(log_ratio, MAX_LOG_RATIO)), with gradient 0 above the bound."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(s A, clip(s, 1 - low, 1 + high) A), and where it has a gradient."""
    objective = (ratio * advantage).minimum(ratio.clamp(1 - low, 1 + high) * advantage)
    lost = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return objective, ~lost


def own_ratio(batch: MicroBatch) -> Tensor:
    """s of own rows; 1 without gradient in peers' rows. There s can be nan or inf, which would reach the
    gradient of all rows."""
    mean_B = batch.mean_logprob_B
    return bounded_exp(mean_B - batch.behaviour_B.where(batch.is_own_B, mean_B.detach()))


def imitation(batch: MicroBatch, update: Update) -> Tensor:
    """1/Q * sum over peers' rows of weight * advantage * (- mean over tokens of log pi). Q is the number
    of problems in the update."""
    nll_B = -batch.mean_logprob_B * batch.advantage_B * batch.weight_B
    return (nll_B * ~batch.is_own_B).sum() / max(len(update.problems), 1)


def loss_output(
    loss: Tensor, batch: MicroBatch, beta: float, *, ratio_B: Tensor, weight_B: Tensor
) -> LossOutput:
    """Add beta * KL to the start weights. The KL is a mean over the minibatch's own samples of the mean
    over tokens of k3 = r - log r - 1 >= 0 with r = pi_start / pi, an unbiased estimate."""
    kl: Tensor | float = 0.0
    if batch.ref_logprobs_BT is not None:
        log_r_BT = (batch.ref_logprobs_BT - batch.logprobs_BT) * batch.mask_BT
        log_r_BT = log_r_BT.clamp(max=MAX_LOG_RATIO)
        k3_BT = (log_r_BT.exp() - log_r_BT - 1) * batch.mask_BT
        k3_B = k3_BT.sum(1) / batch.mask_BT.sum(1)
        kl = (k3_B * batch.is_own_B).sum() / max(batch.num_own, 1)
        loss, kl = loss + beta * kl, kl.detach()
    return LossOutput(loss, ratio_B.detach(), weight_B.detach(), kl)
