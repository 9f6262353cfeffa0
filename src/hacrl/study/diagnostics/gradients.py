"""Gradients of a step by source, at the weights before the step.

A block (own, peers or mixed; plan.py) is treated as one update with all its samples and the floor of its
first planned update. A source's part is the gradient of its samples alone with the block's divisors, so
the parts add up to the block's gradient. No weight changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.algorithms import Algorithm
from hacrl.policy.policy import Policy
from hacrl.study.diagnostics.displacement import Gradient, cosine, displace, norm
from hacrl.training.plan import Plan, minibatch
from hacrl.types import Sample, Update


@dataclass(frozen=True)
class Block:
    """One block of the plan with its samples.

    Example: Block(Update(2, 0.85, "peers", ("p", "q")), updates=2, samples=(...))
    """

    update: Update  # the block's first update, extended to all problems
    updates: int  # number of updates that the block makes in a step
    samples: Sequence[Sample]


def blocks(
    plan: Plan, samples: Sequence[Sample], problems: Sequence[str], rate: float = 1.0
) -> list[Block]:
    """The blocks of the plan that have samples. `rate` is the schedule's factor of the learning rate."""
    found, first = [], 0
    for part, updates in plan.parts:
        update = Update(first, plan.floors[first], part, tuple(problems), rate)
        if chosen := minibatch(samples, update):
            found.append(Block(update, updates, chosen))
        first += updates
    return found


@dataclass
class Directions:
    """The direction in which each source's samples move the learner.

    Example: directions.moves["bee"]["lm_head.weight"]
    """

    metrics: dict[str, float | None]
    moves: dict[str, Gradient]  # displacement by the source's part of one update of its block
    updates: dict[str, int]  # number of updates of that block in a step


def directions(
    policy: Policy, algorithm: Algorithm, parts: Sequence[Block], learner: str
) -> Directions:
    """Norms and cosines of the sources' gradients, and their displacements."""

    def gradient_of(block: Block, rows: Sequence[int]) -> Gradient:
        return policy.gradient(block.samples, rows, algorithm.loss, block.update)

    gradients: list[dict[str, Gradient]] = []
    metrics: dict[str, float | None] = {}
    for block in parts:
        by_source = {}
        even = set(block.update.problems[::2])
        for source in sorted({s.source for s in block.samples}):
            rows = [i for i, s in enumerate(block.samples) if s.source == source]
            if source == learner:  # in two halves, because their cosine measures the noise
                half = {i for i in rows if block.samples[i].problem_id in even}
                by_source[source] = gradient_of(block, sorted(half))
                other = gradient_of(block, [i for i in rows if i not in half])
                metrics[f"diagnostics/cosine/{learner}"] = cosine(by_source[source], other)
                for name, tensor in by_source[source].items():
                    tensor += other[name]
            else:
                by_source[source] = gradient_of(block, rows)
        gradients.append(by_source)
    own = next((found[learner] for found in gradients if learner in found), None)
    for by_source in gradients:
        for source, gradient in by_source.items():
            metrics[f"diagnostics/gradient_norm/{source}"] = norm(gradient)
            if own is not None and source != learner:
                metrics[f"diagnostics/cosine/{source}"] = cosine(own, gradient)
    found = Directions(metrics, {}, {})
    both = list(zip(parts, gradients, strict=True))
    displace(
        policy,
        [(block.updates, list(by_source.values())) for block, by_source in both],
        parts[0].update.rate if parts else 1.0,
    )
    for block, by_source in both:
        for source, move in by_source.items():
            metrics[f"diagnostics/update_norm/{source}"] = norm(move)
            found.moves[source] = move
            found.updates[source] = block.updates
    return found
