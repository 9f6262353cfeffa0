"""Naive sharing: everybody's rollouts in one group, GSPO's objective for own and peers alike.

    A(y) = (R(y) - mean of all judged rewards of the prompt) / (their std, ddof 1, + 1e-6)
    J    = GSPO's, with s against the source's log-probability, whoever the source is

Against hacpo: no capability, no weight, no floor; the tight GSPO clip drops nearly every useful
peer sample (A > 0 with s above 1 + epsilon, A < 0 with s below 1 - epsilon) and keeps the rest at
full strength.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.functional import advantage, mean
from hacrl.algorithms.gspo import Gspo
from hacrl.types import Group, Sample


class Naive(Gspo):
    shares = True

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        rewards = {(t.problem_id, t.agent, t.index): t.reward for g in groups for t in g.judged}
        pooled = {g.problem_id: [t.reward for t in g.judged] for g in groups}
        credited = []
        for sample in samples:
            group = pooled[sample.problem_id]
            reward = rewards[(sample.problem_id, sample.source, sample.index)]
            credited.append(replace(sample, advantage=advantage(reward, mean(group), group)))
        return credited
