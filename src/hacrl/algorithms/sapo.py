"""SAPO (swarm sampling, arXiv 2509.08721): GRPO on own groups and on peers' groups, treated alike.

A group here is the replies of one agent to one prompt. Of a step with Q prompts the learner takes

    J = min( round(external * Q), number of peers' groups with different rewards )   peers' groups
    I = Q - J                                                                        own groups

    A(y) = (R(y) - mean of its author's group) / (std of that group, ddof 1, + 1e-6)
    loss = GRPO's over the samples of all I + J groups, with r_t = pi_k(y_t) / pi_k,old(y_t)

A peer's text counts as if the learner had written it: there is no ratio to its source. A hash of
learner, agent, step and problem chooses among own and among peers' groups. The updates are GRPO's in
number; problems of which only peers' groups were taken come last. With external = 0, or one agent, it
equals grpo. See docs/rivals.md.
"""

from dataclasses import replace

from pydantic import Field

from hacrl.algorithms.base import Needs, SharingSettings, Step
from hacrl.algorithms.functional import is_mixed
from hacrl.algorithms.grpo import Grpo, GrpoSettings
from hacrl.noise import stream_key
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class SapoSettings(SharingSettings, GrpoSettings):
    external: float = Field(0.5, ge=0, le=1)
    """Fraction of a step's groups that come from peers (the paper's best: 4 own, 4 external)."""


class Sapo(Grpo):
    Settings = SapoSettings
    settings: SapoSettings
    needs = Needs("text", "after_credit", "with_own")

    def credit(self, step: Step) -> list[Sample]:
        chosen = self.choose(step)
        kept = [s for s in step.samples if (s.problem_id, s.source) in chosen]
        return super().credit(replace(step, samples=kept))

    def choose(self, step: Step) -> set[tuple[str, str]]:
        """The I + J groups as (problem, agent). The result is the same if `credit` runs again on the
        samples of these groups."""
        own = [(g.problem_id, step.learner) for g in step.groups if g.rewards(step.learner)]
        peers = {
            (s.problem_id, s.source)
            for s in step.samples
            if not s.is_own and is_mixed(step.group(s).rewards(s.source))
        }
        number = step.groups[0].trajectories[0].step if step.groups else 0

        def rank(key: tuple[str, str]) -> tuple[int, tuple[str, str]]:
            return stream_key(0, f"{step.learner}/{key[1]}", number, key[0], 0), key

        taken = min(round(self.settings.external * len(step.groups)), len(peers))
        left = len(step.groups) - taken
        return {*sorted(peers, key=rank)[:taken], *sorted(own, key=rank)[:left]}

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        output = super().loss(batch, update)
        return replace(output, ratio_B=output.ratio_B.nan_to_num(1.0))  # nan: not published
