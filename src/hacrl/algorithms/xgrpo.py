"""xGRPO (arXiv 2605.07244): GRPO with a baseline over all agents' rewards.

    A(y) = (R(y) - mean of all judged rewards of the prompt) / (their std, ddof 1, + 1e-6)
    loss = GRPO's, own samples only

A learner uses peers' rewards, not their texts, so the actor stays on-policy. Own rewards that are all
equal give a signal where a peer's differ. With one agent it equals grpo. A prompt on which all agents'
rewards are equal gives no signal.
"""

from hacrl.algorithms.base import Needs, Step
from hacrl.algorithms.grpo import Grpo
from hacrl.types import Sample


class Xgrpo(Grpo):
    needs = Needs("outcomes")

    def rewards(self, step: Step, sample: Sample) -> list[float]:
        return step.group(sample).rewards()
