"""GRPO (Shao et al., arXiv 2402.03300, with the DAPO clip): GSPO's advantages, token ratios.

    r_t  = exp( log pi(y_t) - log pi_old(y_t) )
    J_t  = min( r_t A, clip(r_t, 1 - token_epsilon_low, 1 + token_epsilon_high) A )
    loss = - mean over all tokens of the minibatch of J_t   [+ beta * KL to the start weights]

Against gspo: every token has its own ratio and long answers weigh more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.algorithms.functional import add_kl, clip_leaves, clipped, sequence_ratio
from hacrl.algorithms.gspo import Gspo
from hacrl.types import Batch, LossOutput, Update


class Grpo(Gspo):
    needs_old_logprobs = True
    zero_advantage_is_zero_loss = True

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """J_t of every token, 0 where padded, and the rows that the clip leaves a gradient."""
        assert batch.old_logprobs_BT is not None
        low, high = self.settings.token_epsilon_low, self.settings.token_epsilon_high
        ratio_BT = torch.exp((batch.logprobs_BT - batch.old_logprobs_BT) * batch.mask_BT)
        advantage_B1 = batch.advantage_B.unsqueeze(1)
        objective_BT = clipped(ratio_BT, advantage_B1, low, high) * batch.mask_BT
        used_BT = clip_leaves(ratio_BT, advantage_B1, low, high) & (batch.mask_BT > 0)
        return objective_BT, used_BT.any(1)

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        objective_BT, used_B = self.objective(batch)
        loss = -objective_BT.sum() / batch.num_tokens
        loss, kl = add_kl(loss, batch, self.settings.beta)
        return LossOutput(loss, sequence_ratio(batch).detach(), used_B, kl)
