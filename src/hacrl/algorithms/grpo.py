"""GRPO (Shao et al., arXiv 2402.03300, with the DAPO clip): GSPO's advantages, one ratio per token.

    r_t  = exp( log pi(y_t) - log pi_old(y_t) )
    J_t  = min( r_t A, clip(r_t, 1 - token_epsilon_low, 1 + token_epsilon_high) A )
    loss = - mean over all tokens of the minibatch of J_t   [+ beta * KL to the start weights]

Unlike gspo, each token has its own ratio, and long answers have more weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from hacrl.algorithms.base import Algorithm, AlgorithmSettings
from hacrl.algorithms.functional import bounded_exp, clipped, loss_output, sequence_ratio
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
        """Return J_t of every token (0 where padded), and each row's weight: the mean over its tokens
        of r_t, 0 for a clipped token."""
        assert batch.old_logprobs_BT is not None
        low, high = self.settings.token_epsilon_low, self.settings.token_epsilon_high
        ratio_BT = bounded_exp((batch.logprobs_BT - batch.old_logprobs_BT) * batch.mask_BT)
        objective_BT, used_BT = clipped(ratio_BT, batch.advantage_B.unsqueeze(1), low, high)
        weight_B = (ratio_BT.where(used_BT, 0.0) * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
        return objective_BT * batch.mask_BT, weight_B

    def own_objective(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """`objective` for a batch whose peers' rows are not scored: these have ratio 1."""
        current_BT = batch.logprobs_BT.detach()
        old_BT = current_BT if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        old_BT = old_BT.where(batch.is_own_B.unsqueeze(1), current_BT)
        return self.objective(replace(batch, old_logprobs_BT=old_BT))

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        objective_BT, weight_B = self.objective(batch)
        loss, s_B = -objective_BT.sum() / batch.num_tokens, sequence_ratio(batch)
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
