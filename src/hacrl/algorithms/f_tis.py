"""F-TIS (arXiv 2605.22537): all agents' samples, each token weighted by a truncated ratio.

    A(y)   = (R(y) - mean of its author's own group) / (std of that group, ddof 1, + 1e-6)
    rho_t  = pi(y_t) / pi_source(y_t), of the same token id on both sides
    J_t    = stopgrad( min(rho_t, tis_cap) ) * A * log pi(y_t)
    KL(y)  = sum over tokens of log pi_source(y_t) - log pi(y_t)
    a peer's sample with A < 0 and KL(y) > tis_kl_threshold is dropped: J = 0
    loss   = - mean over all tokens of the minibatch of J_t   [+ beta * KL to the start weights]

KL(y) is the plain one-sample estimate of the KL divergence from source to learner, at the current
weights. A dropped sample still counts in the divisor of the mean, like a clipped one.

Unlike grpo: peers' samples, without pooling rewards, and a truncated weight instead of the clip for
own and peers' samples: above the cap a token keeps the gradient of the cap. Unlike hacpo: token ids
and their log-probabilities are exchanged, so samples of peers with another vocabulary are dropped
(other_vocabulary). With one agent it is REINFORCE with grpo's advantages and this weight. An author's
prompt whose rewards are all equal gives no signal.
"""

from __future__ import annotations

from hacrl.algorithms.base import Needs
from hacrl.algorithms.functional import add_kl, sequence_ratio
from hacrl.algorithms.gspo import Gspo
from hacrl.types import LossOutput, MicroBatch, Update


class FTis(Gspo):
    """`credit` is gspo's: each sample against its author's group."""

    needs = Needs("tokens")

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        assert batch.source_logprobs_BT is not None
        log_rho_BT = (batch.logprobs_BT.detach() - batch.source_logprobs_BT) * batch.mask_BT
        weight_BT = log_rho_BT.exp().clamp(max=self.settings.tis_cap) * batch.mask_BT
        far_B = -log_rho_BT.sum(1) > self.settings.tis_kl_threshold
        dropped_B = ~batch.is_own_B & (batch.advantage_B < 0) & far_B
        kept_B = batch.advantage_B.masked_fill(dropped_B, 0.0)
        objective_BT = weight_BT * kept_B.unsqueeze(1) * batch.logprobs_BT
        loss = -objective_BT.sum() / batch.num_tokens
        loss, kl = add_kl(loss, batch, self.settings.beta)
        return LossOutput(loss, sequence_ratio(batch).detach(), ~dropped_B, kl)
