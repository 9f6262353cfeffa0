"""Overlap: a peer's reply counts as far as the learner could have written it. Ours, not a paper's.

Learner k, source j, N tokens of the reply in the learner's own tokenizer.

    own:    gspo, untouched: A by the own group, s against the own old policy, gspo's clip
    peers:  A(y)   = (R(y) - mean of the learner's own group) / (std of all judged rewards of q + 1e-6)
            rho(y) = pi_k(y) / pi_j,old(y), of the whole text and not of its average token
            v(y)   = min(1, rho^overlap_power); for N > overlap_tokens, rho^(overlap_tokens / N) for rho
            J      = stopgrad(v) * A * mean over tokens of log pi_k(y)
    follow: where the learner's own group of q failed (judged, and nothing right), a success has v = 1
    loss  = - mean over the samples of the minibatch of J   [+ beta * KL, own samples only]

Why. What can a strong agent take from a weak one that its own further samples would not give? Its
own rare events. On a problem that it solves nine times in ten, its failures carry the gradient and it
hardly sees one in eight replies; a weak peer writes them all the time. Weighed by rho they stand for
what the learner would do, and many samples of small weight are a better estimate of a rare event than
one of weight 1. The same holds the other way round for a weak agent's rare successes. For that the
weight must be the ratio of whole texts. hacpo's s is its N-th root: a failure that the learner writes
six times less often than the peer has s = 0.89 at 15 tokens and passes hacpo's floor with weight 0.79
in the place of 0.17; and a success has s a little above 1 for the stronger learner, where hacpo's
ceiling drops it. min(1, rho) is the chance with which rejection sampling keeps a peer's draw as one
of the learner's own: the two distributions' overlap, never a weight above an own sample's. The root
(overlap_power 0.5) trades some bias for less variance.

Why follow. Where all own replies failed, gspo has no gradient, and a success that the learner would
hardly write has v near 0: the problem would stay lost to it, though a peer shows how it is done. There,
and only there, a success counts in full: imitation, not importance sampling. Where the learner has a
success of its own it can learn from that, and following a peer elsewhere would cost a strong agent its
own way of solving. Chosen on development teams among following nowhere, following who is better at
the problem, and this (docs/results.md).

Against hacpo: no capability, no floor, no ceiling; own samples have exactly gspo's gradient, so a
peer can add to them but not change their baseline. Use order = "mixed": own and peers' samples of a
problem in one update, as if there were more own ones. Alone it is gspo. No signal from a prompt
whose rewards are all equal, nor from a peer's reply that was cut for the learner.

Reported as s of a peer's sample (metrics, `hacrl show samples`) is v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.maths import (
    add_kl,
    advantage,
    all_failed,
    clip_leaves,
    clipped,
    is_right,
    mean,
)
from hacrl.capability import Capability
from hacrl.types import Batch, Group, LossOutput, Sample, Update


class Overlap(Gspo):
    shares = True
    zero_advantage_is_zero_loss = True

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        own = super().credit([s for s in samples if s.is_own], groups, capability, learner)
        mine = iter(own)
        by_problem = {group.problem_id: group for group in groups}
        credited = []
        for sample in samples:
            if sample.is_own:
                credited.append(next(mine))
            elif peer := self._peer(sample, by_problem[sample.problem_id], learner):
                credited.append(peer)
        return credited

    def _peer(self, sample: Sample, group: Group, learner: str) -> Sample | None:
        """A peer's sample as one more reply of the learner's; None if it cannot be one."""
        own = [t.reward for t in group.judged if t.agent == learner]
        (theirs,) = (t for t in group.judged if (t.agent, t.index) == (sample.source, sample.index))
        if not own or theirs.finish is not sample.finish:  # unknown level, or another text: cut
            return None
        a = advantage(theirs.reward, mean(own), [t.reward for t in group.judged])
        if self.settings.overlap_follow and is_right(theirs) and all_failed(group, learner):
            return replace(sample, advantage=a, weight=1.0, behaviour=None)  # no ratio asked: v = 1
        # The same total over the learner's number of tokens, so that s^N is the texts' ratio.
        assert sample.behaviour is not None
        behaviour = sample.behaviour * theirs.num_tokens / sample.num_reply_tokens
        return replace(sample, advantage=a, weight=1.0, behaviour=behaviour)

    def overlap(self, batch: Batch) -> Tensor:
        """v of every row, without gradient; 1 where a reply is followed."""
        tokens_B = batch.mask_BT.sum(1).clamp(max=self.settings.overlap_tokens)
        log_rho_B = (batch.mean_logprob_B.detach() - batch.behaviour_B) * tokens_B
        v_B = torch.exp(log_rho_B * self.settings.overlap_power).clamp(max=1.0)
        return v_B.nan_to_num(1.0)

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        own_B, v_B, mean_B = batch.is_own_B, self.overlap(batch), batch.mean_logprob_B
        # Only own rows have an s: a nan or inf in the others' would spoil the gradient of all.
        s_B = torch.exp(mean_B - torch.where(own_B, batch.behaviour_B, mean_B.detach()))
        mine_B = clipped(s_B, batch.advantage_B, low, high)
        peer_B = v_B * batch.advantage_B * mean_B
        loss = -torch.where(own_B, mine_B, peer_B).sum() / batch.num_samples
        loss, kl = add_kl(loss, batch, self.settings.beta)
        left_B = clip_leaves(s_B, batch.advantage_B, low, high)
        used_B = torch.where(own_B, left_B, v_B > 0)
        return LossOutput(loss, torch.where(own_B, s_B, v_B).detach(), used_B.detach(), kl)
