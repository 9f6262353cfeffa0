"""Rows of known ratios, updates with them, and whether two policies are in one state afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hacrl.algorithms import algorithm_class, make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.policy.policy import Policy
from hacrl.policy.update import UpdateReport
from hacrl.types import Sample, Update

Spec = tuple[bool, float, float]
"""Whether the row is the learner's own, its ratio s, its advantage."""

UPDATE = Update(0, 2, 0.8, "mixed", ("p0", "p1"))
PEERS = replace(UPDATE, part="peers")  # begins without a graph
WIDE = {"epsilon_low": 0.1, "epsilon_high": 0.1}

# (own, s, advantage): what the learner makes of each row at the weights below. With the clip at 0.1
# and the floor at 0.8, hacpo leaves no gradient to the rows marked dead.
SPECS = [
    (True, 1.0, 1.0),
    (True, 1.5, 1.0),  # dead: above the clip, and good
    (True, 0.5, -1.0),  # dead: below the clip, and bad
    (True, 1.0, 0.0),  # advantage 0
    (True, 0.5, 0.7),
    (False, 0.9, 1.2),
    (False, 1.3, 1.0),  # dead: above 1
    (False, 0.5, -1.0),  # dead: below the floor
    (False, 0.9, 0.0),  # advantage 0
    (False, 0.85, -0.8),
    (False, 2.0, -0.4),  # dead: above 1
    (False, 0.3, 0.6),  # dead: below the floor
]
DEAD, NOTHING = 6, 2


def rows_of(p: Policy, specs: Sequence[Spec], shared: bool = False) -> list[Sample]:
    """Rows of several lengths, of two problems, whose ratio, of the sequence and of every token, is the
    wanted one at the weights of `p`. Where prompts are `shared`, each problem has one; otherwise every
    row has its own."""
    generator = torch.Generator().manual_seed(5)
    made, prompts = [], dict[int, list[int]]()
    for i, (own, s, advantage) in enumerate(specs):
        prompt, reply = (
            torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3 + i % 2, 4 + i)
        )
        if shared:
            prompt = prompts.setdefault(i % 2, prompt)
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


def policy(model: Path, beta: float = 0.0, **changes) -> Policy:
    settings = {"name": "a", "model": str(model), "learning_rate": 1e-3, **changes}
    return Policy(AgentConfig(**settings), device="cpu", temperature=1.0, beta=beta)


def rows(p: Policy, specs=SPECS, shared: bool = False) -> list[Sample]:
    return rows_of(p, specs, shared)


def algorithm(name: str = "hacpo", **settings):
    known = algorithm_class(name).Settings.model_fields
    wide = {key: value for key, value in WIDE.items() if key in known}
    return make_algorithm(make_settings(name, **{**wide, **settings}))


def learn(
    p: Policy, samples: list[Sample], name: str = "hacpo", update: Update = UPDATE, **settings
) -> UpdateReport:
    return p.update(samples, algorithm(name, **settings).loss, update)


def assert_equal_state(a: Policy, b: Policy) -> None:
    """Gradients, weights, moments and counts of steps, to float tolerance."""
    for name, parameter in a.master.items():
        other = b.master[name]
        assert torch.allclose(parameter.grad, other.grad, atol=1e-6, rtol=0)
        one, two = a.optimizer.state[parameter], b.optimizer.state[other]
        assert one["step"] == two["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(one[key], two[key], atol=1e-6, rtol=0)
    assert a.updates_made == b.updates_made
