"""Gradients of a step, source by source, at the weights that the step begins with.

A block (own, peers or mixed; plan.py) is taken as one update of all its samples, with the floor of its
first planned update. A source's share is the gradient of its samples alone with the block's divisors,
so the shares of a block add up to the block's gradient. Nothing is updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.algorithms import Algorithm
from hacrl.policy.policy import Policy
from hacrl.study.diagnostics.displacement import Gradient, cosine, displace, norm
from hacrl.training.plan import Plan, minibatch
from hacrl.types import Sample, Update


@dataclass(frozen=True)
class Block:
    """One part of the plan with its samples.

    Example: Block(Update(2, 4, 0.85, "peers", ("p", "q")), updates=2, samples=(...))
    """

    update: Update
    """As if all of the part's problems were in its first update."""
    updates: int
    """How many it really makes in a step."""
    samples: Sequence[Sample]


def blocks(plan: Plan, samples: Sequence[Sample], problems: Sequence[str]) -> list[Block]:
    """The parts of the plan that have samples."""
    found, first = [], 0
    for part, updates in plan.parts:
        update = Update(first, len(plan.floors), plan.floors[first], part, tuple(problems))
        if chosen := minibatch(samples, update):
            found.append(Block(update, updates, chosen))
        first += updates
    return found


@dataclass
class Directions:
    """Where each source's samples push the learner in one step.

    Example: directions.moves["bee"]["lm_head.weight"]
    """

    metrics: dict[str, float | None]
    moves: dict[str, Gradient]
    """Displacement by one update of the source's block, the source's share of it."""
    updates: dict[str, int]
    """Updates of that block in a step."""


def directions(
    policy: Policy, algorithm: Algorithm, parts: Sequence[Block], learner: str
) -> Directions:
    """Norms and cosines of the sources' gradients, and their displacements."""
    gradients: list[dict[str, Gradient]] = []
    metrics: dict[str, float | None] = {}
    for block in parts:
        shares = {}
        for source in sorted({s.source for s in block.samples}):
            rows = [i for i, s in enumerate(block.samples) if s.source == source]
            if source == learner:  # two halves: their cosine tells how noisy one such gradient is
                even = set(block.update.problems[::2])
                halves = [
                    _gradient(policy, algorithm, block, half)
                    for half in (
                        [i for i in rows if block.samples[i].problem_id in even],
                        [i for i in rows if block.samples[i].problem_id not in even],
                    )
                ]
                metrics[f"diagnostics/cosine/{learner}"] = cosine(*halves)
                for name, tensor in halves[0].items():
                    tensor += halves[1][name]
                shares[source] = halves[0]
            else:
                shares[source] = _gradient(policy, algorithm, block, rows)
        gradients.append(shares)
    own = next((shares[learner] for shares in gradients if learner in shares), None)
    for shares in gradients:
        for source, gradient in shares.items():
            metrics[f"diagnostics/gradient_norm/{source}"] = norm(gradient)
            if own is not None and source != learner:
                metrics[f"diagnostics/cosine/{source}"] = cosine(own, gradient)
    found = Directions(metrics, {}, {})
    both = list(zip(parts, gradients, strict=True))
    displace(policy, [(block.updates, list(shares.values())) for block, shares in both])
    for block, shares in both:
        for source, move in shares.items():
            metrics[f"diagnostics/update_norm/{source}"] = norm(move)
            found.moves[source] = move
            found.updates[source] = block.updates
    return found


def _gradient(policy: Policy, algorithm: Algorithm, block: Block, rows: Sequence[int]) -> Gradient:
    return policy.gradient(block.samples, rows, algorithm.loss, block.update)
