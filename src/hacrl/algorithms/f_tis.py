"""F-TIS (arXiv 2605.22537): everybody's samples, each token weighted by a truncated ratio.

    A(y)   = (R(y) - mean of its author's own group) / (std of that group, ddof 1, + 1e-6)
    rho_t  = pi(y_t) / pi_source(y_t), of the same token id on both sides
    J_t    = stopgrad( min(rho_t, tis_cap) ) * A * log pi(y_t)
    KL(y)  = sum over tokens of log pi_source(y_t) - log pi(y_t)
    a peer's sample with A < 0 and KL(y) > tis_kl_threshold is dropped: J = 0
    loss   = - mean over all tokens of the minibatch of J_t   [+ beta * KL to the start weights]

The estimate KL(y) is the plain one of the whole reply (its mean over the source's replies is the KL
from source to learner), at the weights of the moment. A dropped sample counts in the mean's divisor,
like a clipped one.

Against grpo: peers' samples, with no pooling of rewards, and a truncated weight in the place of the
clip, for own and peers alike: above the cap a token keeps its gradient at the cap's strength. Against
hacpo: tokens and their log-probabilities must cross, so only peers of the learner's own vocabulary
count; the others' samples are dropped from the view (other_vocabulary). Alone it is REINFORCE with
grpo's advantages and this weight. No signal from an author's prompt whose rewards are all equal.
"""

from __future__ import annotations

import torch

from hacrl.algorithms.functional import add_kl, sequence_ratio
from hacrl.algorithms.gspo import Gspo
from hacrl.types import Batch, LossOutput, Update


class FTis(Gspo):
    """`credit` is gspo's: every sample by the group it was drawn in."""

    shares = True
    needs_tokens = True
    zero_advantage_is_zero_loss = True

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        assert batch.source_logprobs_BT is not None
        log_rho_BT = (batch.logprobs_BT.detach() - batch.source_logprobs_BT) * batch.mask_BT
        weight_BT = torch.exp(log_rho_BT).clamp(max=self.settings.tis_cap) * batch.mask_BT
        far_B = -log_rho_BT.sum(1) > self.settings.tis_kl_threshold
        dropped_B = ~batch.is_own_B & (batch.advantage_B < 0) & far_B
        kept_B = torch.where(dropped_B, 0.0, batch.advantage_B)
        objective_BT = weight_BT * kept_B.unsqueeze(1) * batch.logprobs_BT
        loss = -objective_BT.sum() / batch.num_tokens
        loss, kl = add_kl(loss, batch, self.settings.beta)
        return LossOutput(loss, sequence_ratio(batch).detach(), ~dropped_B, kl)
