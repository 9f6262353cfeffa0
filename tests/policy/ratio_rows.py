"""Samples of known ratios, updates with them, and a comparison of two policies afterwards."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from hacrl.algorithms import algorithm_class, make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.policy.policy import Policy
from hacrl.policy.update import UpdateReport
from hacrl.types import Sample, Update

Spec = tuple[bool, float, float]
"""(is own, ratio s, advantage)"""

UPDATE = Update(0, 0.8, "mixed", ("p0", "p1"))
WIDE = {"epsilon_low": 0.1, "epsilon_high": 0.1}

# With the clip at 0.1 and the floor at 0.8, hacpo gives the rows marked "zero" no gradient.
SPECS = [
    (True, 1.0, 1.0),
    (True, 1.5, 1.0),  # zero: above the clip, and good
    (True, 0.5, -1.0),  # zero: below the clip, and bad
    (True, 1.0, 0.0),  # advantage 0
    (True, 0.5, 0.7),
    (False, 0.9, 1.2),
    (False, 1.3, 1.0),  # zero: above 1
    (False, 0.5, -1.0),  # zero: below the floor
    (False, 0.9, 0.0),  # advantage 0
    (False, 0.85, -0.8),
    (False, 2.0, -0.4),  # zero: above 1
    (False, 0.3, 0.6),  # zero: below the floor
]


def rows_of(p: Policy, specs: Sequence[Spec] = SPECS, shared: bool = False) -> list[Sample]:
    """Samples of several lengths, of two problems, with the given ratio (of the sequence and of every
    token) at the weights of `p`. If `shared`, each problem has one prompt; otherwise every sample has
    its own."""
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
        mask = (0,) * len(prompt) + (1,) * len(reply)
        sample = Sample(
            f"p{i % 2}", i, "a" if own else "b", own, (*prompt, *reply), mask,
            sum(before) / len(before), old_logprobs=before, source_logprobs=before,
            advantage=advantage, weight=1.0 if own else 1.3,
        )  # fmt: skip
        made.append(sample)
    return made


def policy(model: Path, beta: float = 0.0, temperature: float = 1.0, **changes) -> Policy:
    settings = {"name": "a", "model": str(model), "learning_rate": 1e-3, **changes}
    return Policy(AgentConfig(**settings), device="cpu", temperature=temperature, beta=beta)


def algorithm(name: str = "hacpo", **settings):
    known = algorithm_class(name).Settings.model_fields
    wide = {key: value for key, value in WIDE.items() if key in known}
    return make_algorithm(make_settings(name, **{**wide, **settings}))


def learn(p: Policy, samples: list[Sample], update: Update = UPDATE, **settings) -> UpdateReport:
    return p.update(samples, algorithm(**settings).loss, update)


def assert_equal_state(a: Policy, b: Policy) -> None:
    """Assert equal gradients, moments and step counts, to float tolerance."""
    for name, parameter in a.master.items():
        other = b.master[name]
        assert torch.allclose(parameter.grad, other.grad, atol=1e-6, rtol=0)
        one, two = a.optimizer.state[parameter], b.optimizer.state[other]
        assert one["step"] == two["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(one[key], two[key], atol=1e-6, rtol=0)
    assert a.updates_made == b.updates_made
