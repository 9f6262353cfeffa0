"""GSPO with dynamic sampling (DAPO, arXiv 2503.14476): every group of a minibatch gives a signal.

    list(step) = task.batch(step, list_factor * prompts_per_step)
    The first prompts_per_step prompts of the list are sampled. Prompts whose rewards are all equal are
    replaced by the next ones of the list, until prompts_per_step groups are mixed or the list ends.
    loss = GSPO's, over the samples of the mixed groups

Every rollout counts in the budget: the metric `rollouts` includes those of replaced prompts. Agents have
different problems, so it is for learning alone. training/dynamic.py samples the rounds.
"""

from hacrl.algorithms.base import DynamicSettings, Step
from hacrl.algorithms.functional import is_mixed
from hacrl.algorithms.gspo import Gspo, GspoSettings
from hacrl.types import Sample


class GspoDynamicSettings(DynamicSettings, GspoSettings):
    pass


class GspoDynamic(Gspo):
    Settings = GspoDynamicSettings

    def credit(self, step: Step) -> list[Sample]:
        return [s for s in super().credit(step) if is_mixed(self.rewards(step, s))]
