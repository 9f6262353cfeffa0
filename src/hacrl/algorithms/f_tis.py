"""F-TIS (arXiv 2605.22537): all agents' samples, each token weighted by a truncated ratio.

    A(y)   = (R(y) - mean of its author's own group) / (std of that group, ddof 1, + 1e-6)
    rho_t  = pi(y_t) / pi_source(y_t), of the same token id on both sides
    J_t    = stopgrad( min(rho_t, tis_cap) ) * A * log pi(y_t)
    KL(y)  = sum over tokens of log pi_source(y_t) - log pi(y_t)
    a peer's sample with A < 0 and KL(y) > kl_threshold is dropped: J = 0
    loss   = - mean over all tokens of the minibatch of J_t   [+ beta * KL to the start weights]

KL(y) is the one-sample estimate of the KL from source to learner at the current weights. A dropped
sample still counts in the divisor, like a clipped one. Unlike grpo: peers' samples, and a truncated
weight instead of the clip. Unlike hacpo: token ids and log-probabilities are exchanged, so samples of
peers with another vocabulary are dropped (other_vocabulary). An author's prompt whose rewards are all
equal gives no signal.
"""

from pydantic import Field

from hacrl.algorithms.base import Algorithm, Needs, PeerSettings
from hacrl.algorithms.functional import bounded_exp, loss_output, sequence_ratio
from hacrl.types import LossOutput, MicroBatch, Update


class FTisSettings(PeerSettings):
    tis_cap: float = Field(2.0, gt=0)
    """Token weights are truncated at this value."""
    kl_threshold: float = Field(50.0, ge=0)
    """A peer's sample of negative advantage is dropped if its KL(y) is larger."""


class FTis(Algorithm):
    """`credit` is the default: each sample against its author's replies to the problem."""

    Settings = FTisSettings
    settings: FTisSettings
    needs = Needs("tokens")

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        assert batch.source_logprobs_BT is not None
        log_rho_BT = (batch.logprobs_BT.detach() - batch.source_logprobs_BT) * batch.mask_BT
        weight_BT = bounded_exp(log_rho_BT).clamp(max=self.settings.tis_cap) * batch.mask_BT
        far_B = -log_rho_BT.sum(1) > self.settings.kl_threshold
        dropped_B = ~batch.is_own_B & (batch.advantage_B < 0) & far_B
        kept_B = batch.advantage_B.masked_fill(dropped_B, 0.0)
        objective_BT = weight_BT * kept_B.unsqueeze(1) * batch.logprobs_BT
        weight_B = weight_BT.sum(1) / batch.mask_BT.sum(1) * ~dropped_B
        loss, s_B = -objective_BT.sum() / batch.num_tokens, sequence_ratio(batch)
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
