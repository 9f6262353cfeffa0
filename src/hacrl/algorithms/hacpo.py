"""HACPO (arXiv 2603.02604): learn from every member's verified rollouts.

Learner k, source j, n agents. Each line of code below carries its equation's number.

    mu_k(q) = sum_j sum_i w(k,j) * R(y_j,i) / number of judged samples of q                    (7)
    A_k(y)  = (R(y) - mu_k(q)) / (std of all judged raw rewards of q, ddof 1, + 1e-6)          (6)
    s(k,j)  = exp( mean_k log pi_k(y) - mean_j log pi_j,old(y) )                              (11)
    own:    J = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A )                   (47-49)
    peers:  t = clip(s, floor(m), 1);  J = t * stopgrad(t)^alpha * w(j,k) * A       (10, 12-14, 50-52)
    loss    = - mean over the samples of the minibatch of J   [+ beta * KL, own samples only]

Against gspo: peers' samples, a baseline that corrects for how strong each source is, and a one-sided
trust interval for peers instead of the clip. A peer sample outside [floor, 1] has exactly zero
gradient. Alone it is gspo. No signal from a prompt whose rewards are all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

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
from hacrl.errors import UserError
from hacrl.types import Batch, Group, LossOutput, Sample, Update


class Hacpo:
    shares = True
    needs_behaviour = True
    needs_old_logprobs = False
    zero_advantage_is_zero_loss = True
    needs_tokens = False
    peers_join = False

    def __init__(self, settings: AlgorithmSettings, reward_range: tuple[float, float]) -> None:
        if reward_range[0] < 0:
            raise UserError(
                f"hacpo needs rewards of at least 0 (capability is a ratio of mean rewards), but the "
                f"verifier declares the range {reward_range}. Shift the rewards, or use "
                "algorithm.name=naive."
            )
        self.settings = settings
        self.largest_reward = reward_range[1]

    def baseline(self, group: Group, capability: Capability, learner: str) -> float:
        """mu_k(q): every source's rewards brought to the learner's level."""
        judged = group.judged
        rewards = [t.reward for t in judged]
        if min(rewards) == max(rewards):  # uniform: nothing to learn, the baseline is the reward
            return rewards[0]
        if not self.settings.capability_baseline:
            return mean(rewards)
        total = sum(
            capability.ratio(learner, t.agent, group.task) * t.reward for t in judged
        )  # (7)
        mu = total / len(judged)  # (7)
        own = [t.reward for t in judged if t.agent == learner]
        if self.settings.baseline_guard and mu > self.largest_reward:
            return mean(own or rewards)
        return mu

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        by_problem = {group.problem_id: group for group in groups}
        reward = {(t.problem_id, t.agent, t.index): t.reward for g in groups for t in g.judged}
        pooled = {g.problem_id: [t.reward for t in g.judged] for g in groups}
        baselines: dict[tuple[str, str], float] = {}
        credited = []
        for sample in samples:
            group = by_problem[sample.problem_id]
            judge = sample.source if self.settings.peer_advantage == "source" else learner
            if (sample.problem_id, judge) not in baselines:
                baselines[(sample.problem_id, judge)] = self.baseline(group, capability, judge)
            mu = baselines[(sample.problem_id, judge)]
            rewarded = reward[(sample.problem_id, sample.source, sample.index)]
            a = advantage(rewarded, mu, pooled[sample.problem_id])  # (6)
            w = capability.ratio(sample.source, learner, group.task)  # (8), (10): w(j,k)
            w = w if self.settings.capability_weight else 1.0
            credited.append(replace(sample, advantage=a, weight=w))
        return credited

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        s_B = sequence_ratio(batch)  # (11)
        own_B = clipped(s_B, batch.advantage_B, low, high)  # (47-49)
        t_B = s_B.clamp(update.floor, self.settings.ceiling)  # (13, 14)
        exponential_B = t_B * t_B.detach() ** self.settings.alpha  # (12)
        peer_B = exponential_B * batch.weight_B * batch.advantage_B  # (10, 50-52)
        objective_B = torch.where(batch.is_own_B, own_B, peer_B)
        loss = -objective_B.sum() / self._divisor(batch, update)  # (53)
        loss, kl = add_kl(loss, batch, self.settings.beta)
        inside_B = (s_B >= update.floor) & (s_B <= self.settings.ceiling)
        used_B = torch.where(
            batch.is_own_B, clip_leaves(s_B, batch.advantage_B, low, high), inside_B
        )
        return LossOutput(loss, s_B.detach(), used_B.detach(), kl)

    def _divisor(self, batch: Batch, update: Update) -> int:
        if self.settings.normaliser == "paper" and update.part == "mixed" and batch.num_own:
            return batch.num_own  # (53): own and peer sums each over the learner's own count
        return batch.num_samples
