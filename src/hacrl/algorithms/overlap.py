"""Overlap: a peer's reply counts by how likely the learner is to write it. This project's own rule.

Learner k, source j, N tokens of the reply in the learner's tokenizer. For a problem q:

    rho(y) = pi_k,old(y) / pi_j,old(y), of the whole text, not of the average token
    v(y)   = min(1, rho^power) for a peer's reply, 1 for an own one
             N > ratio_tokens: rho^(ratio_tokens / N) instead of rho
    follow:  where the learner's own group failed (judged, none right), a success has v = 1
    b(q)   = the smaller of: the mean of own rewards; the mean of own rewards and of those of peers'
             samples, weighted by v
    A(y)   = (R(y) - b) / (sqrt( sum v (R - b)^2 / (sum v - 1) ) + 1e-6), for own and peers' replies
    own:     J = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A ), as gspo
    peers:   J = v * A * mean over tokens of log pi_k(y)
    loss   = - sum of J / number of own samples of the minibatch   [+ beta * KL, own samples only]
             (an update without own samples divides by all samples: order = "own_first", "peers_first")

Ratio of whole texts. A strong agent's rare failures carry the gradient of a problem that it solves
nine times in ten, but it sees about one in eight replies. A weak peer writes such failures often.
Weighted by rho they stand for the learner's own distribution, and many samples of small weight
estimate a rare event better than one sample of weight 1. The same holds for a weak agent's rare
successes. hacpo's s is the N-th root of rho: a failure that the learner writes six times less often
than the peer has s = 0.89 at 15 tokens and passes hacpo's floor with weight 0.79 instead of 0.17. A
stronger learner's success has s slightly above 1, where hacpo's ceiling drops it. Peers' draws kept
with probability min(1, rho) follow the minimum of the two densities: the overlap. No weight exceeds
that of an own sample.

Baseline. Truncation at 1 removes most weight where the learner is likelier than the peer, which is
on its successes. What remains of a weaker peer is mostly failures, and against the learner's own mean
their advantages have a negative sum. Such a step makes the sampled texts less likely in total and
spreads that probability over everything else; a strong agent beside a useless one lost accuracy by
it. Against the weighted mean of all, the advantages of a problem sum to zero. Better peers raise that
mean, and then the own mean stays: the sampled texts become likelier in total, and these are
successes, which harmed no agent in docs/results.md.

Follow. Where all own replies failed, gspo has no gradient (for rewards 0 and 1) and an unlikely
success has v near 0, so the learner would not learn from a peer that solves the problem. Only there
a success counts in full: imitation, not importance sampling.

Divisor. With the number of own samples, a peer of weight 0 leaves exactly gspo's gradient. Divided by
all samples, half of it would remain.

Small weights. Where all own replies are alike and only peers differ, the deviation comes from peers
alone, and their part of the gradient grows with the root of their weight: eight failures of v = 0.01
beside eight own successes have a third of the pull of one own failure.

Unlike hacpo: no capability, no floor, no ceiling, and order = "mixed" by default. It costs a forward
pass over peers' samples before the first update. With one agent it equals gspo. No signal from a
prompt whose rewards are all equal, nor from a reply truncated for the learner. In metrics and `hacrl
samples` a peer's weight is v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp

from pydantic import Field

from hacrl.algorithms.base import Needs, PeerSettings, Step
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
from hacrl.algorithms.gspo import Gspo, GspoSettings
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class OverlapSettings(PeerSettings, GspoSettings):
    power: float = Field(1.0, ge=0, le=1)
    """Exponent of the ratio of whole texts: 1 is the exact ratio, 0 gives every peer's sample weight
    1."""
    ratio_tokens: int = Field(32, ge=1)
    """The ratio of a longer reply is scaled to this number of tokens, because the exact ratio of a
    long text is nearly always 0."""
    follow: bool = True
    """Where all own replies to a problem failed, a peer's success has weight 1 even if it is very
    unlikely to the learner. Off: it is weighted by its ratio too, for ablations."""


class Overlap(Gspo):
    Settings = OverlapSettings
    settings: OverlapSettings
    needs = Needs("logprob", "before_credit", "mixed")
    weighs_by_ratio = False

    def credit(self, step: Step) -> list[Sample]:
        weighted = [(s, v) for s in step.samples if (v := self.weight(step, s)) is not None]
        peers: dict[str, list[tuple[float, float]]] = {}
        for sample, v in weighted:
            seen = peers.setdefault(sample.problem_id, [])
            if not sample.is_own:
                seen.append((step.reward(sample), v))
        levels: dict[str, tuple[float, float]] = {}
        credited = []
        for sample, v in weighted:
            if (problem := sample.problem_id) not in levels:
                own = step.group(sample).rewards(step.learner)
                levels[problem] = level(own, peers[problem])
            b, spread = levels[problem]
            a = (step.reward(sample) - b) / (spread + SMALL) if spread else 0.0
            credited.append(replace(sample, advantage=a, weight=v))
        return credited

    def weight(self, step: Step, sample: Sample) -> float | None:
        """Return v, or None for a peer's reply that is left out: a truncated one, or one to a problem
        without a judged own reply."""
        group, reply = step.group(sample), step.reply(sample)
        if sample.is_own:
            return 1.0
        if sample.truncated or not group.rewards(step.learner):
            return None
        if self.settings.follow and is_right(reply) and all_failed(group, step.learner):
            return 1.0
        assert sample.old_logprobs is not None and sample.behaviour is not None
        log_rho = sum(sample.old_logprobs) - sample.behaviour * reply.num_tokens
        tempered = min(1.0, self.settings.ratio_tokens / sample.num_reply_tokens)
        return exp(min(0.0, log_rho * tempered * self.settings.power))

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        own_B, mean_B = batch.is_own_B, batch.mean_logprob_B
        # s of own rows only: nan or inf in a peer's row would reach the gradient of all rows.
        s_B = (mean_B - batch.behaviour_B.where(own_B, mean_B.detach())).exp()
        mine_B = clipped(s_B, batch.advantage_B, low, high)
        peer_B = batch.weight_B * batch.advantage_B * mean_B
        loss = -mine_B.where(own_B, peer_B).sum() / (batch.num_own or batch.num_samples)
        loss, kl = add_kl(loss, batch, self.settings.beta)
        left_B = clip_leaves(s_B, batch.advantage_B, low, high)
        used_B = left_B.where(own_B, batch.weight_B > 0)
        return LossOutput(loss, sequence_ratio(batch).detach(), used_B.detach(), kl)


def level(own: Sequence[float], peers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return b and the deviation from it, for own rewards and peers' (reward, v) pairs. The deviation
    is 0 where all rewards are equal.

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
