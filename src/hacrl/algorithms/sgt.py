"""SGT (arXiv 2605.07244): GRPO, plus imitation of one peer's success where all own replies failed.

    own:   GRPO's loss, a mean over the tokens of the minibatch's own samples
    y*(q): one success of a peer, for prompts q where every own reply failed and a peer succeeded
    loss = GRPO + lambda * 1/Q * sum over q with a y* of - mean over tokens of log pi(y*)
    lambda = imitation_weight

Q is the number of prompts in the update, so the weight of y* does not depend on how many other
prompts have one. y* is trained in the update of its prompt: the updates are GRPO's in number and size.
A success is a reply with verdict OK; a hash of agent, step, problem and index chooses among several.
With one agent, or where no peer succeeds, it equals grpo. A prompt that all agents fail gives no
signal. See docs/rivals.md.
"""

from dataclasses import replace

from pydantic import Field

from hacrl.algorithms.base import Needs, SharingSettings, Step
from hacrl.algorithms.functional import all_failed, imitation, loss_output, sequence_ratio
from hacrl.algorithms.grpo import Grpo, GrpoSettings
from hacrl.noise import stream_key
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class SgtSettings(SharingSettings, GrpoSettings):
    imitation_weight: float = Field(0.1, ge=0)
    """lambda: weight of the imitation of a peer's success."""


class Sgt(Grpo):
    Settings = SgtSettings
    settings: SgtSettings
    needs = Needs("text", updates="with_own")

    def credit(self, step: Step) -> list[Sample]:
        """Own samples as in grpo; of peers' samples only the chosen successes, with advantage 1 and
        weight lambda."""
        best: dict[str, tuple[int, Sample]] = {}
        for sample in step.samples:
            t = step.reply(sample)
            failed = not sample.is_own and all_failed(step.group(sample), step.learner)
            if failed and t.is_right:
                rank = stream_key(0, t.agent, t.step, t.problem_id, t.index)
                if sample.problem_id not in best or rank < best[sample.problem_id][0]:
                    best[sample.problem_id] = (rank, sample)
        chosen = {id(sample) for _, sample in best.values()}
        kept = [s for s in step.samples if s.is_own or id(s) in chosen]
        return [
            s if s.is_own else replace(s, advantage=1.0, weight=self.settings.imitation_weight)
            for s in super().credit(replace(step, samples=kept))
        ]

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        own_B = batch.is_own_B
        objective_BT, own_weight_B = self.own_objective(batch)
        grpo = -(objective_BT * own_B.unsqueeze(1)).sum() / max(batch.num_own_tokens, 1)
        loss = grpo + imitation(batch, update)
        s_B = sequence_ratio(batch).nan_to_num(1.0)  # nan: no behaviour published
        weight_B = own_weight_B.where(own_B, batch.weight_B)
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
