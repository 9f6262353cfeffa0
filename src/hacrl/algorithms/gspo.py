"""GSPO (Zheng et al., arXiv 2507.18071): each agent alone, one ratio for a whole sequence.

    A(y) = (R(y) - mean of own group) / (std of own group, ddof 1, + 1e-6)
    s(y) = exp( mean over tokens of log pi(y) - log pi_old(y) )
    J    = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A )
    loss = - mean over the samples of the minibatch of J   [+ beta * KL to the start weights]

No signal from a prompt whose rewards are all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.functional import (
    add_kl,
    advantage,
    clip_leaves,
    clipped,
    mean,
    sequence_ratio,
)
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.types import Batch, Group, LossOutput, Sample, Update


class Gspo:
    shares = False
    needs_behaviour = True
    needs_old_logprobs = False
    zero_advantage_is_zero_loss = True
    needs_tokens = False
    peers_join = False

    def __init__(self, settings: AlgorithmSettings, reward_range: tuple[float, float]) -> None:
        self.settings = settings

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        """Every sample by the group it was drawn in: its author's own replies to the problem."""
        rewards = {(t.problem_id, t.agent, t.index): t.reward for g in groups for t in g.judged}
        drawn: dict[tuple[str, str], list[float]] = {}
        for (problem_id, agent, _), reward in rewards.items():
            drawn.setdefault((problem_id, agent), []).append(reward)
        credited = []
        for sample in samples:
            group = drawn[(sample.problem_id, sample.source)]
            reward = rewards[(sample.problem_id, sample.source, sample.index)]
            a = advantage(reward, mean(group), group)
            credited.append(replace(sample, advantage=a, weight=1.0))
        return credited

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        s_B = sequence_ratio(batch)
        objective_B = clipped(s_B, batch.advantage_B, low, high)
        loss = -objective_B.sum() / batch.num_samples
        loss, kl = add_kl(loss, batch, self.settings.beta)
        used_B = clip_leaves(s_B, batch.advantage_B, low, high)
        return LossOutput(loss, s_B.detach(), used_B.detach(), kl)
