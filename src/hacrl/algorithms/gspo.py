"""GSPO (Zheng et al., arXiv 2507.18071): each agent alone, one ratio per sequence.

    A(y) = (R(y) - mean of own group) / (std of own group, ddof 1, + 1e-6)
    s(y) = exp( mean over tokens of log pi(y) - log pi_old(y) )
    J    = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A )
    loss = - mean over the samples of the minibatch of J   [+ beta * KL to the start weights]

A prompt whose rewards are all equal gives no signal.
"""

from pydantic import Field

from hacrl.algorithms.base import Algorithm, AlgorithmSettings
from hacrl.algorithms.functional import clipped, loss_output, sequence_ratio
from hacrl.types import LossOutput, MicroBatch, Update


class GspoSettings(AlgorithmSettings):
    epsilon_low: float = Field(3e-4, gt=0, lt=1)
    """Clip of own samples' sequence ratio below 1 (eq. 47-49 of HACPO)."""
    epsilon_high: float = Field(4e-4, gt=0)
    """Clip of own samples' sequence ratio above 1."""


class Gspo(Algorithm):
    """`credit` is the default: each sample against its author's replies to the problem."""

    Settings = GspoSettings
    settings: GspoSettings

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        s_B = sequence_ratio(batch)
        objective_B, used_B = clipped(s_B, batch.advantage_B, low, high)
        loss = -(batch.weight_B * objective_B).sum() / batch.num_samples
        weight_B = batch.weight_B * s_B.where(used_B, 0.0)
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
