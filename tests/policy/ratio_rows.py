"""Rows of known ratios, for tests of what an update makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hacrl.policy.policy import Policy
from hacrl.types import Sample

Spec = tuple[bool, float, float]
"""Whether the row is the learner's own, its ratio s, its advantage."""


def rows_of(p: Policy, specs: Sequence[Spec]) -> list[Sample]:
    """Rows of several lengths, of two problems, whose ratio, of the sequence and of every token, is the
    wanted one at the weights of `p`."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for i, (own, s, advantage) in enumerate(specs):
        prompt, reply = (
            torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3 + i % 2, 4 + i)
        )
        (score,) = p.score([(prompt, reply)])
        before = tuple(x - math.log(s) for x in score)
        made.append(
            Sample(
                problem_id=f"p{i % 2}",
                index=i,
                source="a" if own else "b",
                is_own=own,
                token_ids=(*prompt, *reply),
                loss_mask=(0,) * len(prompt) + (1,) * len(reply),
                behaviour=sum(before) / len(before),
                old_logprobs=before,
                source_logprobs=before,
                advantage=advantage,
                weight=1.0 if own else 1.3,
            )
        )
    return made
