"""GSPO (Zheng et al., arXiv 2507.18071): each agent alone, one ratio per sequence.

    A(y) = (R(y) - mean of own group) / (std of own group, ddof 1, + 1e-6)
    s(y) = exp( mean over tokens of log pi(y) - log pi_old(y) )
    J    = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A )
    loss = - mean over the samples of the minibatch of J   [+ beta * KL to the start weights]

A prompt whose rewards are all equal gives no signal.
"""

from __future__ import annotations

from dataclasses import replace

from hacrl.algorithms.base import Algorithm, Step
from hacrl.algorithms.functional import (
    add_kl,
    advantage,
    clip_leaves,
    clipped,
    mean,
    sequence_ratio,
)
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class Gspo(Algorithm):
    def rewards(self, step: Step, sample: Sample) -> list[float]:
        """The rewards that a sample is compared with: those of its author's replies."""
        return step.group(sample).rewards(sample.source)

    def credit(self, step: Step) -> list[Sample]:
        credited = []
        for sample in step.samples:
            rewards = self.rewards(step, sample)
            a = advantage(step.reward(sample), mean(rewards), rewards)
            credited.append(replace(sample, advantage=a, weight=1.0))
        return credited

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        s_B = sequence_ratio(batch)
        objective_B = clipped(s_B, batch.advantage_B, low, high)
        loss = -objective_B.sum() / batch.num_samples
        loss, kl = add_kl(loss, batch, self.settings.beta)
        used_B = clip_leaves(s_B, batch.advantage_B, low, high)
        return LossOutput(loss, s_B.detach(), used_B.detach(), kl)
