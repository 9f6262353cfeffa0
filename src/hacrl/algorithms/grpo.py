"""GRPO (Shao et al., arXiv 2402.03300, with the DAPO clip): GSPO's advantages, one ratio per token.

    r_t  = exp( log pi(y_t) - log pi_old(y_t) )
    J_t  = min( r_t A, clip(r_t, 1 - token_epsilon_low, 1 + token_epsilon_high) A )
    loss = - mean over all tokens of the minibatch of J_t   [+ beta * KL to the start weights]

Unlike gspo, each token has its own ratio, and long answers have more weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hacrl.algorithms.base import Algorithm, AlgorithmSettings
from hacrl.algorithms.functional import add_kl, clip_leaves, clipped, sequence_ratio
from hacrl.types import LossOutput, MicroBatch, Update

if TYPE_CHECKING:
    from torch import Tensor


class GrpoSettings(AlgorithmSettings):
    token_epsilon_low: float = Field(0.2, gt=0, lt=1)
    """Clip of the token ratio below 1."""
    token_epsilon_high: float = Field(0.28, gt=0)
    """Clip of the token ratio above 1."""


class Grpo(Algorithm):
    Settings = GrpoSettings
    settings: GrpoSettings

    def objective(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return J_t of every token (0 where padded), and the rows with a token that the clip leaves
        a gradient."""
        assert batch.old_logprobs_BT is not None
        low, high = self.settings.token_epsilon_low, self.settings.token_epsilon_high
        ratio_BT = ((batch.logprobs_BT - batch.old_logprobs_BT) * batch.mask_BT).exp()
        advantage_B1 = batch.advantage_B.unsqueeze(1)
        objective_BT = clipped(ratio_BT, advantage_B1, low, high) * batch.mask_BT
        used_BT = clip_leaves(ratio_BT, advantage_B1, low, high) & (batch.mask_BT > 0)
        return objective_BT, used_BT.any(1)

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        objective_BT, used_B = self.objective(batch)
        loss = -objective_BT.sum() / batch.num_tokens
        loss, kl = add_kl(loss, batch, self.settings.beta)
        return LossOutput(loss, sequence_ratio(batch).detach(), used_B, kl)
