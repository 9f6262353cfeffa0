"""GRAFT (arXiv 2609.37868): a peer's mixed group in the place of an own group that failed whole.

    candidates(k <- j) = prompts where all of k's replies failed and j's are mixed
    taken(k <- j)      = the min(|candidates(k <- j)|, |candidates(j <- k)|) of them where j succeeded
                         most often, ties with the last one kept
    A(y)   = the source's: (R(y) - mean of its own group) / (std of its own group, ddof 1, + 1e-6)
    s(y)   = exp( mean_k log pi_k,old(y) - mean_j log pi_j,old(y) ),  each mean over its own tokens
    w(y)   = 1[s > graft_threshold] * min(s, graft_cap) for a peer's sample, 1 for an own one
    r_t    = pi_k(y_t) / pi_k,old(y_t), on the learner's own tokens, whoever the source is
    J_t    = w * min( r_t A, clip(r_t, 1 - token_epsilon_low, 1 + token_epsilon_high) A )
    loss   = - mean over all tokens of the minibatch of J_t   [+ beta * KL, own samples only]

With more than two agents the exchange is reckoned for every pair by itself, and a failed group is
replaced by the candidate with most successes (ties: the first name). Every learner reckons it from
the cut alone, which holds both sides' verdicts, so that both come to the same numbers without a word.

Against grpo: some groups are replaced. The own failed samples of such a prompt leave the loss: they
had advantage 0, and staying they would only dilute the mean. The updates are GRPO's in number and
size, and those with peers' groups come last. w is fixed for the step, being of the old policy; a
sample of weight 0 has no gradient but counts in the mean. If a view lost all of a peer's group, the
own group stays. Alone, or where one direction has no candidate, it is grpo. No signal from a prompt
that both fail, nor from one that the peer always solves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.functional import add_kl, all_failed, sequence_ratio, successes
from hacrl.algorithms.grpo import Grpo
from hacrl.types import Batch, Group, LossOutput, Sample, Update


def candidates(groups: Sequence[Group], taker: str, giver: str) -> dict[str, int]:
    """Prompts that the taker failed whole and the giver solved sometimes: the giver's successes."""
    found = {}
    for group in groups:
        right, judged = successes(group, giver)
        if all_failed(group, taker) and 0 < right < judged:
            found[group.problem_id] = right
    return found


def exchange(groups: Sequence[Group], learner: str) -> dict[str, str]:
    """Which failed prompts of the learner take whose group."""
    best: dict[str, tuple[int, str]] = {}
    for peer in sorted({t.agent for g in groups for t in g.judged} - {learner}):
        mine, theirs = candidates(groups, learner, peer), candidates(groups, peer, learner)
        count = min(len(mine), len(theirs))
        least = sorted(mine.values(), reverse=True)[count - 1] if count else float("inf")
        for problem_id, right in mine.items():
            if right >= least and right > best.get(problem_id, (0, ""))[0]:
                best[problem_id] = (right, peer)  # peers come by name: the first keeps a tie
    return {problem_id: peer for problem_id, (_, peer) in best.items()}


class Graft(Grpo):
    shares = True
    peers_join = True
    zero_advantage_is_zero_loss = True

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        """Each sample by its author's own group; replaced own groups and unused peers left out."""
        giver = exchange(groups, learner)
        taken = {s.problem_id for s in samples if giver.get(s.problem_id) == s.source}
        authors = {p: giver[p] for p in taken}
        kept = [s for s in samples if s.source == authors.get(s.problem_id, learner)]
        return super().credit(kept, groups, capability, learner)

    def weight(self, batch: Batch) -> Tensor:
        """w of every row."""
        assert batch.old_logprobs_BT is not None
        old_B = (batch.old_logprobs_BT * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
        s_B = torch.exp(old_B - batch.behaviour_B)
        peer_B = (s_B > self.settings.graft_threshold) * s_B.clamp(max=self.settings.graft_cap)
        return torch.where(batch.is_own_B, torch.ones_like(peer_B), peer_B)

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        objective_BT, used_B = self.objective(batch)
        weight_B = self.weight(batch)
        loss = -(weight_B.unsqueeze(1) * objective_BT).sum() / batch.num_tokens
        loss, kl = add_kl(loss, batch, self.settings.beta)
        return LossOutput(loss, sequence_ratio(batch).detach(), used_B & (weight_B > 0), kl)
