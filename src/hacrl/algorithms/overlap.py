"""Overlap: a peer's reply counts by how likely the learner is to write it. An algorithm of this project.

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
             (an update without own samples divides by all samples)

Weighted by rho, a peer's replies stand for the learner's own distribution: a weak peer shows a strong
learner its rare failures, and a strong peer shows a weak learner its rare successes. docs/rivals.md
explains baseline, divisor and `follow`. With one agent it equals gspo. No signal from a prompt whose
rewards are all equal, nor from a reply truncated for the learner.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import exp

from pydantic import Field

from hacrl.algorithms.base import Needs, PeerSettings, Step
from hacrl.algorithms.functional import (
    SMALL,
    all_failed,
    clipped,
    loss_output,
    mean,
    own_ratio,
    sequence_ratio,
)
from hacrl.algorithms.gspo import Gspo, GspoSettings
from hacrl.types import LossOutput, MicroBatch, Sample, Update


class OverlapSettings(PeerSettings, GspoSettings):
    power: float = Field(1.0, ge=0, le=1)
    """Exponent of the ratio of whole texts: 1 is the exact ratio, 0 gives all samples weight 1."""
    ratio_tokens: int = Field(32, ge=1)
    """The ratio of a longer reply is scaled to this number of tokens; the exact one is nearly 0."""
    success_tokens: int | None = Field(None, ge=0)
    """`ratio_tokens` of right replies of trusted peers. 1: the ratio of the average token, as in hacpo,
    so that a success counts although the learner would hardly write it. 0: weight 1. Unset:
    ratio_tokens."""
    smallest_deviation: float | None = Field(None, gt=0)
    """Lower bound of the deviation that A is divided by. Without it, peers' failures of small weight
    count by the square root of their weight where all own replies are right. 0.35 (1 / sqrt 8) is
    the deviation of one success among eight own replies. Unset: no bound."""
    follow: bool = True
    """Where all own replies to a problem failed, a peer's success has weight 1. Off, or for a peer that
    is not trusted: its ratio."""


class Overlap(Gspo):
    Settings = OverlapSettings
    settings: OverlapSettings
    needs = Needs("logprob", "before_credit", "mixed")

    def credit(self, step: Step) -> list[Sample]:
        weighted = [(s, v) for s in step.samples if (v := self.weight(step, s)) is not None]
        peers: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for s, v in weighted:
            if not s.is_own:
                peers[s.problem_id].append((step.reward(s), v))
        one_of = {s.problem_id: s for s, _ in weighted}
        smallest = self.settings.smallest_deviation or 0.0
        levels = {
            p: level(step.group(s).rewards(step.learner), peers[p], smallest)
            for p, s in one_of.items()
        }
        credited = []
        for s, v in weighted:
            b, spread = levels[s.problem_id]
            a = (step.reward(s) - b) / (spread + SMALL) if spread else 0.0
            credited.append(replace(s, advantage=a, weight=v))
        return credited

    def weight(self, step: Step, sample: Sample) -> float | None:
        """Return v, or None to leave out a peer's reply: a truncated one, or one to a problem without a
        judged own reply."""
        if sample.is_own:
            return 1.0
        group, reply = step.group(sample), step.reply(sample)
        if sample.truncated or not group.rewards(step.learner):
            return None
        follows = self.settings.follow and step.trusts(sample.source)
        if follows and reply.is_right and all_failed(group, step.learner):
            return 1.0
        assert sample.old_logprobs is not None and sample.behaviour is not None
        log_rho = sum(sample.old_logprobs) - sample.behaviour * reply.num_tokens
        tokens = self.settings.ratio_tokens
        limit = self.settings.success_tokens
        if limit is not None and reply.is_right and step.trusts(sample.source):
            tokens = limit
        tempered = min(1.0, tokens / sample.num_reply_tokens)
        return exp(min(0.0, log_rho * tempered * self.settings.power))

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        own_B, mean_B = batch.is_own_B, batch.mean_logprob_B
        s_B = own_ratio(batch)
        mine_B, left_B = clipped(s_B, batch.advantage_B, low, high)
        peer_B = batch.weight_B * batch.advantage_B * mean_B
        loss = -mine_B.where(own_B, peer_B).sum() / (batch.num_own or batch.num_samples)
        ratio_B, weight_B = (
            sequence_ratio(batch),
            s_B.where(left_B, 0.0).where(own_B, batch.weight_B),
        )
        return loss_output(loss, batch, self.settings.beta, ratio_B=ratio_B, weight_B=weight_B)


def level(
    own: Sequence[float], peers: Sequence[tuple[float, float]], smallest: float = 0.0
) -> tuple[float, float]:
    """Return b and the deviation from it, at least `smallest` (0 where all rewards are equal); peers'
    are (reward, v) pairs.

    Example: level([1, 0], [(0, 0.5)]) == (0.4, sqrt((0.36 + 0.16 + 0.5 * 0.16) / 1.5))
    """
    rewards = [*own, *(reward for reward, _ in peers)]
    total = len(own) + sum(v for _, v in peers)
    everyone = (sum(own) + sum(v * reward for reward, v in peers)) / total
    b = min(mean(own), everyone)
    if min(rewards) == max(rewards) or total <= 1:
        return b, 0.0
    squares = sum((r - b) ** 2 for r in own) + sum(v * (r - b) ** 2 for r, v in peers)
    return b, max((squares / (total - 1)) ** 0.5, smallest)
