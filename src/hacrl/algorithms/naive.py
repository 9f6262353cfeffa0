"""Naive sharing: all agents' rollouts in one group, GSPO's objective for own and peers' samples.

    A(y) = (R(y) - mean of all judged rewards of the prompt) / (their std, ddof 1, + 1e-6)
    J    = GSPO's, with s against the source's log-probability, for every source

Unlike hacpo: no capability, no weight, no floor. GSPO's clip drops a peer's success only above
1 + epsilon and a failure only below 1 - epsilon. The paper reports it below learning alone, which
docs/results.md does not confirm.
"""

from hacrl.algorithms.base import Needs, PeerSettings, Step
from hacrl.algorithms.gspo import Gspo, GspoSettings
from hacrl.types import Sample


class NaiveSettings(PeerSettings, GspoSettings):
    pass


class Naive(Gspo):
    Settings = NaiveSettings
    needs = Needs("logprob")

    def rewards(self, step: Step, sample: Sample) -> list[float]:
        return step.group(sample).rewards()
