"""SGT (arXiv 2605.07244): GRPO, and one verified success of a peer to imitate where all own failed.

    own:   GRPO's loss, a mean over the tokens of the minibatch's own samples
    y*(q): one success of a peer, for prompts q where every own reply failed and a peer succeeded
    loss = GRPO + lambda * 1/Q * sum over q with a y* of - mean over tokens of log pi(y*)

Q is the number of prompts of the update, so that a rescued prompt weighs the same however many
others need it: with G samples a prompt one y* pulls about lambda * G times as hard as an own sample
of advantage 1. y* rides in the update of its own prompt: the updates are GRPO's in number and size.

Against grpo: the added term, nothing else; the failed own samples stay and carry advantage 0. It
needs the text alone, no log-probability of the source. A success is a reply whose verdict is OK; of
several that the learner can read, a hash of agent, step, problem and index takes one, so that no
member is favoured by its name. Alone, or where no peer knows better, it is grpo. No signal from a
prompt that everybody fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.functional import add_kl, all_failed, is_right, sequence_ratio
from hacrl.algorithms.grpo import Grpo
from hacrl.noise import stream_key
from hacrl.types import Batch, Group, LossOutput, Sample, Update


class Sgt(Grpo):
    shares = True
    needs_behaviour = False
    peers_join = True
    zero_advantage_is_zero_loss = True

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        """Own samples as in grpo, and of peers' only the chosen successes: advantage 1, weight
        lambda."""
        rank = {
            (t.problem_id, t.agent, t.index): stream_key(0, t.agent, t.step, t.problem_id, t.index)
            for g in groups
            if all_failed(g, learner)
            for t in g.judged
            if t.agent != learner and is_right(t)
        }
        chosen: dict[str, tuple[str, str, int]] = {}
        for key in sorted({(s.problem_id, s.source, s.index) for s in samples} & rank.keys()):
            best = chosen.setdefault(key[0], key)
            chosen[key[0]] = min(best, key, key=lambda k: rank[k])
        taken = set(chosen.values())
        kept = [s for s in samples if s.is_own or (s.problem_id, s.source, s.index) in taken]
        return [
            s if s.is_own else replace(s, advantage=1.0, weight=self.settings.sgt_lambda)
            for s in super().credit(kept, groups, capability, learner)
        ]

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        objective_BT, used_B = self.objective(batch)
        own_B = batch.is_own_B
        grpo = -objective_BT[own_B].sum() / max(batch.num_own_tokens, 1)
        nll_B = -batch.mean_logprob_B * batch.advantage_B * batch.weight_B
        loss = grpo + nll_B[~own_B].sum() / max(len(update.problems), 1)
        loss, kl = add_kl(loss, batch, self.settings.beta)
        # A source without log-probabilities has no ratio; the term does not ask for it.
        ratio_B = sequence_ratio(batch).detach().nan_to_num(1.0)
        return LossOutput(loss, ratio_B, torch.where(own_B, used_B, True), kl)
