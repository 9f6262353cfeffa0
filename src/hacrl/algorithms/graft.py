"""GRAFT (arXiv 2609.37868): a peer's mixed group replaces an own group that failed completely.

    candidates(k <- j) = prompts where all of k's replies failed and j's are mixed
    taken(k <- j)      = the min(|candidates(k <- j)|, |candidates(j <- k)|) of them where j succeeded
                         most often, including ties with the last one
    A(y)   = the source's: (R(y) - mean of its own group) / (std of its own group, ddof 1, + 1e-6)
    s(y)   = exp( mean_k log pi_k,old(y) - mean_j log pi_j,old(y) ),  each mean over its own tokens
    w(y)   = min(s, cap) for a peer's sample, 1 for an own one; a peer's sample with s <= threshold is
             refused: it leaves the minibatch and the divisor of the mean
    r_t    = pi_k(y_t) / pi_k,old(y_t), on the learner's tokens, for every source
    J_t    = w * min( r_t A, clip(r_t, 1 - token_epsilon_low, 1 + token_epsilon_high) A )
    loss   = - mean over all tokens of the minibatch of J_t   [+ beta * KL, own samples only]

With more than two agents the exchange is computed for every pair, and a failed group is replaced by
that of the peer with most successes (ties: the first name). Every learner computes it from the step's
snapshot, which holds all verdicts. The updates are GRPO's in number and size, those with peers' groups
come last. w uses the old policy, so it is fixed for the step. With one agent, or where one direction
has no candidate, it equals grpo. A prompt that both fail, or that the peer always solves, gives no
signal. See docs/rivals.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp

from pydantic import Field

from hacrl.algorithms.base import Needs, SharingSettings, Step
from hacrl.algorithms.functional import (
    MAX_LOG_RATIO,
    all_failed,
    loss_output,
    mean,
    sequence_ratio,
    successes,
)
from hacrl.algorithms.grpo import Grpo, GrpoSettings
from hacrl.types import Group, LossOutput, MicroBatch, Sample, Update


def candidates(groups: Sequence[Group], taker: str, giver: str) -> dict[str, int]:
    """The giver's successes by prompt, where all of the taker's replies failed and its own are mixed."""
    found = {}
    for group in groups:
        right, judged = successes(group, giver)
        if all_failed(group, taker) and 0 < right < judged:
            found[group.problem_id] = right
    return found


def exchange(groups: Sequence[Group], learner: str) -> dict[str, str]:
    """The learner's failed prompts that take a peer's group, with the name of that peer."""
    best: dict[str, tuple[int, str]] = {}
    for peer in sorted({t.agent for g in groups for t in g.judged} - {learner}):
        mine, theirs = candidates(groups, learner, peer), candidates(groups, peer, learner)
        count = min(len(mine), len(theirs))
        least = sorted(mine.values(), reverse=True)[count - 1] if count else float("inf")
        for problem_id, right in mine.items():
            if right >= least and right > best.get(problem_id, (0, ""))[0]:
                best[problem_id] = (right, peer)  # sorted peers: the first name wins a tie
    return {problem_id: peer for problem_id, (_, peer) in best.items()}


class GraftSettings(SharingSettings, GrpoSettings):
    threshold: float = Field(0.8, ge=0)
    """A peer's sample with a ratio s at or below it is refused."""
    cap: float = Field(1.0, gt=0)
    """Largest weight of a peer's sample."""


class Graft(Grpo):
    Settings = GraftSettings
    settings: GraftSettings
    needs = Needs("logprob", "after_credit", "with_own")

    def credit(self, step: Step) -> list[Sample]:
        """Each sample against its author's group. Replaced own groups, unused peers' groups and, once
        they are scored, refused samples are left out."""
        giver = exchange(step.groups, step.learner)
        authors = {
            s.problem_id: s.source for s in step.samples if giver.get(s.problem_id) == s.source
        }
        kept = [s for s in step.samples if s.source == authors.get(s.problem_id, step.learner)]
        credited = super().credit(replace(step, samples=kept))
        return [replace(s, weight=w) for s in credited if (w := self.weight(s)) > 0]

    def weight(self, sample: Sample) -> float:
        """w, or 0 for a refused sample. A peer's sample has it from the second `credit` on."""
        if sample.is_own or sample.old_logprobs is None:
            return 1.0
        assert sample.behaviour is not None
        s = exp(min(mean(sample.old_logprobs) - sample.behaviour, MAX_LOG_RATIO))
        return min(s, self.settings.cap) if s > self.settings.threshold else 0.0

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        objective_BT, weight_B = self.objective(batch)
        loss = -(batch.weight_B.unsqueeze(1) * objective_BT).sum() / batch.num_tokens
        s_B, weight_B = sequence_ratio(batch), weight_B * batch.weight_B
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
