"""SFT on successes: GSPO, plus imitation of every success of every peer.

    own:   GSPO's loss, a mean over the minibatch's own samples
    S(q):  all successes of peers on prompt q
    loss = GSPO + lambda * 1/Q * sum over q of the mean over S(q) of - mean over tokens of log pi(y)
    lambda = imitation_weight

This is sgt's imitation term without its condition that all own replies failed, and with all successes
instead of one: plain distillation among peers, for comparison. Q is the number of prompts in the update,
so a prompt has the same weight however many successes it has. A success is trained in the update of its
prompt: the updates are GSPO's in number and size. With one agent, or where no peer succeeds, it equals
gspo.
"""

from collections import Counter
from dataclasses import replace

from pydantic import Field

from hacrl.algorithms.base import Needs, SharingSettings, Step
from hacrl.algorithms.functional import (
    clipped,
    imitation,
    loss_output,
    own_ratio,
    sequence_ratio,
)
from hacrl.algorithms.gspo import Gspo, GspoSettings
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class SftSuccessSettings(SharingSettings, GspoSettings):
    imitation_weight: float = Field(0.1, ge=0)
    """lambda: weight of the imitation of peers' successes."""


class SftSuccess(Gspo):
    Settings = SftSuccessSettings
    settings: SftSuccessSettings
    needs = Needs("text", updates="with_own")

    def credit(self, step: Step) -> list[Sample]:
        """Own samples as in gspo; peers' successes with advantage 1 and weight lambda / |S(q)|."""
        kept = [s for s in step.samples if s.is_own or step.reply(s).is_right]
        found = Counter(s.problem_id for s in kept if not s.is_own)
        each = {p: self.settings.imitation_weight / n for p, n in found.items()}
        return [
            s if s.is_own else replace(s, advantage=1.0, weight=each[s.problem_id])
            for s in super().credit(replace(step, samples=kept))
        ]

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        own_B, s_B = batch.is_own_B, own_ratio(batch)
        objective_B, used_B = clipped(s_B, batch.advantage_B, low, high)
        gspo = -(objective_B * own_B).sum() / max(batch.num_own, 1)
        loss = gspo + imitation(batch, update)
        ratio_B = sequence_ratio(batch).nan_to_num(1.0)  # nan: no behaviour published
        weight_B = s_B.where(used_B, 0.0).where(own_B, batch.weight_B)
        return loss_output(loss, batch, self.settings.beta, ratio_B=ratio_B, weight_B=weight_B)
