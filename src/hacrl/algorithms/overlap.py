"""Overlap: a peer's reply counts as far as the learner could have written it. Ours, not a paper's.

Learner k, source j, N tokens of the reply in the learner's own tokenizer. For a problem q:

    rho(y) = pi_k,old(y) / pi_j,old(y), of the whole text and not of its average token
    v(y)   = min(1, rho^overlap_power) for a peer's reply, 1 for an own one
             N > overlap_tokens: rho^(overlap_tokens / N) in the place of rho
    follow:  where the learner's own group failed (judged, and nothing right), a success has v = 1
    b(q)   = the least of: the mean of own rewards; the mean of these and of the peers' that the learner
             sees, each weighed by v
    A(y)   = (R(y) - b) / (sqrt( sum v (R - b)^2 / (sum v - 1) ) + 1e-6), for own replies and peers'
    own:     J = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A ), as gspo
    peers:   J = v * A * mean over tokens of log pi_k(y)
    loss   = - sum of J / number of own samples of the minibatch   [+ beta * KL, own samples only]
             (of all samples, in an update without own ones: order = "own_first" or "peers_first")

Why the ratio of whole texts. What can a strong agent take from a weak one that its own further
samples would not give? Its own rare events. On a problem that it solves nine times in ten, its
failures carry the gradient and it hardly sees one in eight replies; a weak peer writes them all the
time. Weighed by rho they stand for what the learner would do, and many samples of small weight are a
better estimate of a rare event than one of weight 1. The same holds the other way round for a weak
agent's rare successes. hacpo's s is the N-th root of rho: a failure that the learner writes six times
less often than the peer has s = 0.89 at 15 tokens and passes hacpo's floor with weight 0.79 in the
place of 0.17; and a success has s a little above 1 for the stronger learner, where hacpo's ceiling
drops it. Peers' draws kept with the chance min(1, rho) are distributed as the lower of the two
densities: what the two have in common, never with a weight above an own sample's.

Why that baseline. Weights cut at 1 lose most where the learner is likelier than the peer, and those
are its successes: of a weaker peer mostly failures are left, and measured by the learner's own mean
their advantages add up to less than nothing. A step that on the whole makes texts less likely spreads
what it takes over everything else; a strong agent beside a useless one lost by it. By the weighed mean
of all, the advantages of a problem add up to nothing. Peers better than the learner lift that mean, and
then its own stays: on the whole texts become likelier, successes at that, which nobody was seen to lose
by (docs/results.md).

Why follow. Where all own replies failed, gspo has no gradient (where rewards are right or wrong), and a
success that the learner would hardly write has v near 0: the problem would stay lost to it, though a
peer shows how it is done. There, and only there, a success counts in full: imitation, not importance
sampling.

Why the number of own samples. A peer of no weight then leaves every update exactly gspo's gradient of
the own samples in it; divided by all samples, it would be half of it.

How far a small weight reaches. Where all own replies are alike and only peers differ, the deviation is
theirs alone, and their share of the gradient goes as the root of their weight: eight failures of v =
0.01 beside eight own successes push as a third of one own failure would.

Against hacpo: no capability, no floor, no ceiling, and order = "mixed" unless set otherwise: own and
peers' samples of a problem in one update. It costs a forward of peers' samples before the first update.
Alone it is gspo. No signal from a prompt whose rewards are all equal, nor from a peer's reply that was
cut for the learner. A peer's weight in metrics and `hacrl samples` is v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import torch

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.functional import (
    SMALL,
    add_kl,
    all_failed,
    clip_leaves,
    clipped,
    is_right,
    mean,
    sequence_ratio,
)
from hacrl.algorithms.gspo import Gspo
from hacrl.types import Batch, Group, LossOutput, Sample, Trajectory, Update


class Overlap(Gspo):
    shares = True
    scores_before_credit = True
    order = "mixed"
    weighs_by_ratio = False
    zero_advantage_is_zero_loss = True

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        by_problem = {group.problem_id: group for group in groups}
        weighed: list[tuple[Sample, float, float]] = []  # with reward and v
        peers: dict[str, list[tuple[float, float]]] = {group.problem_id: [] for group in groups}
        for sample in samples:
            group = by_problem[sample.problem_id]
            (reply,) = (
                t for t in group.judged if (t.agent, t.index) == (sample.source, sample.index)
            )
            v = self.weight(sample, reply, group, learner)
            if v is None:
                continue
            weighed.append((sample, reply.reward, v))
            if not sample.is_own:
                peers[sample.problem_id].append((reply.reward, v))
        levels = {
            problem_id: level(
                [t.reward for t in by_problem[problem_id].judged if t.agent == learner],
                peers[problem_id],
            )
            for problem_id in {sample.problem_id for sample, _, _ in weighed}
        }
        credited = []
        for sample, reward, v in weighed:
            b, spread = levels[sample.problem_id]
            a = (reward - b) / (spread + SMALL) if spread else 0.0
            credited.append(replace(sample, advantage=a, weight=v))
        return credited

    def weight(self, sample: Sample, reply: Trajectory, group: Group, learner: str) -> float | None:
        """v; None for a peer's reply that takes no part."""
        if sample.is_own:
            return 1.0
        if sample.cut or not any(t.agent == learner for t in group.judged):
            return None  # another text; or the learner's own level is unknown
        if self.settings.overlap_follow and is_right(reply) and all_failed(group, learner):
            return 1.0
        assert sample.old_logprobs is not None and sample.behaviour is not None
        log_rho = sum(sample.old_logprobs) - sample.behaviour * reply.num_tokens
        tempered = min(1.0, self.settings.overlap_tokens / sample.num_reply_tokens)
        return exp(min(0.0, log_rho * tempered * self.settings.overlap_power))

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        own_B, mean_B = batch.is_own_B, batch.mean_logprob_B
        # Only own rows have an s: a nan or inf in the others' would spoil the gradient of all.
        s_B = torch.exp(mean_B - torch.where(own_B, batch.behaviour_B, mean_B.detach()))
        mine_B = clipped(s_B, batch.advantage_B, low, high)
        peer_B = batch.weight_B * batch.advantage_B * mean_B
        loss = -torch.where(own_B, mine_B, peer_B).sum() / (batch.num_own or batch.num_samples)
        loss, kl = add_kl(loss, batch, self.settings.beta)
        left_B = clip_leaves(s_B, batch.advantage_B, low, high)
        used_B = torch.where(own_B, left_B, batch.weight_B > 0)
        return LossOutput(loss, sequence_ratio(batch).detach(), used_B.detach(), kl)


def level(own: Sequence[float], peers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """b and the deviation from it, of own rewards and of peers' with their v; 0 where nothing differs.

    Example: level([1, 0], [(0, 0.5)]) == (0.4, sqrt((0.36 + 0.16 + 0.5 * 0.16) / 1.5))
    """
    rewards = [*own, *(reward for reward, _ in peers)]
    total = len(own) + sum(v for _, v in peers)
    everyone = (sum(own) + sum(v * reward for reward, v in peers)) / total
    b = min(mean(own), everyone)
    if min(rewards) == max(rewards) or total <= 1:
        return b, 0.0
    squares = sum((r - b) ** 2 for r in own) + sum(v * (r - b) ** 2 for r, v in peers)
    return b, (squares / (total - 1)) ** 0.5
