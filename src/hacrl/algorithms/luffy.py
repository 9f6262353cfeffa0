"""LUFFY (arXiv 2504.14945): own and peers' samples in one group, a shaped weight for peers' tokens.

    A(y)  = (R(y) - mean of all judged rewards of the prompt) / (their std, ddof 1, + 1e-6)
    own:    J_t = min( r_t A, clip(r_t, 1 - token_epsilon_low, 1 + token_epsilon_high) A )
    peers:  J_t = f(pi(y_t)) A,  f(p) = p / (p + gamma),  dJ_t / dlog p = gamma p / (p + gamma)^2 A
    loss  = - mean over all tokens of the minibatch of J_t   [+ beta * KL, own samples only]

f takes the place of the ratio to the source, whose probability is set to 1. Peers' samples have no clip.
The gradient of a peer's token is largest at p = gamma, where it is A / 4; it vanishes for p near 0 and
is 0.08 A at p = 1 (gamma 0.1). With one agent it equals grpo. A prompt on which all agents' rewards are
equal gives no signal. See docs/rivals.md.
"""

from pydantic import Field

from hacrl.algorithms.base import Needs, PeerSettings, Step
from hacrl.algorithms.functional import loss_output, sequence_ratio
from hacrl.algorithms.grpo import Grpo, GrpoSettings
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class LuffySettings(PeerSettings, GrpoSettings):
    gamma: float = Field(0.1, gt=0)
    """The token probability at which a peer's token has the largest gradient."""


class Luffy(Grpo):
    Settings = LuffySettings
    settings: LuffySettings
    needs = Needs("text", updates="mixed")

    def rewards(self, step: Step, sample: Sample) -> list[float]:
        return step.group(sample).rewards()

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        gamma, own_B = self.settings.gamma, batch.is_own_B
        own_BT, own_weight_B = self.own_objective(batch)
        p_BT = batch.logprobs_BT.exp()
        f_BT = p_BT / (p_BT + gamma) * batch.mask_BT
        objective_BT = own_BT.where(own_B.unsqueeze(1), f_BT * batch.advantage_B.unsqueeze(1))
        slope_BT = gamma * p_BT / (p_BT + gamma) ** 2 * batch.mask_BT
        weight_B = own_weight_B.where(own_B, slope_BT.sum(1) / batch.mask_BT.sum(1))
        loss, s_B = -objective_BT.sum() / batch.num_tokens, sequence_ratio(batch).nan_to_num(1.0)
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
