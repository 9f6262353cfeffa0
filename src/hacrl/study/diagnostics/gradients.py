"""Gradients of a step by source, at the weights before the step, and the displacement that they cause.

A block (own, peers or mixed; plan.py) is treated as one update with all its samples and the floor of its
first planned update. A source's part is the gradient of its samples alone with the block's divisors, so
the parts add up to the block's gradient. No weight changes. Through AdamW a part g of a gradient G moves

    d = - rate * c * g / (sqrt(v^) + eps),     c = min(1, max_grad_norm / (|G| + 1e-6))

with v^ the second moment at the end of the step: displacements are additive (docs/diagnostics.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from hacrl.algorithms import Algorithm
from hacrl.policy.policy import Policy
from hacrl.training.plan import Plan, minibatch
from hacrl.types import Sample, Update

Gradient = dict[str, Tensor]


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


# ---------------------------------------------------------------- displacement


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Inner product over all tensors."""
    return sum(torch.dot(a[n].flatten(), b[n].flatten()).item() for n in a)


def norm(a: Mapping[str, Tensor]) -> float:
    return sqrt(dot(a, a))


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float | None:
    """None if one of the two is zero."""
    lengths = norm(a) * norm(b)
    return dot(a, b) / lengths if lengths else None


@torch.no_grad()
def displace(
    policy: Policy, blocks: Sequence[tuple[int, Sequence[Gradient]]], rate_factor: float = 1.0
) -> None:
    """Turn gradients into displacements by one update, in place: another copy of the weights for each
    would be most of a check's memory. Each block is (number of updates in the step, the parts of one
    update's gradient), in the order of the step."""
    group = policy.optimizer.param_groups[0]
    (_, decay), eps, rate = group["betas"], group["eps"], policy.learning_rate(rate_factor)
    clips = []
    for _, shares in blocks:
        whole = sqrt(max(0.0, sum(dot(a, b) for a in shares for b in shares)))
        clips.append(min(1.0, policy.agent.max_grad_norm / (whole + 1e-6)))
    moments = _second_moments(policy)
    for name, like in blocks[0][1][0].items() if blocks else ():
        stored, count = moments.get(name, (torch.zeros_like(like), 0))
        second = stored.to(like)
        for (updates, shares), clip in zip(blocks, clips, strict=True):
            whole_gradient = clip * torch.stack([share[name] for share in shares]).sum(0)
            kept = decay**updates
            second = kept * second + (1 - kept) * whole_gradient.square()
            count += updates
        size = (second / (1 - decay**count)).sqrt() + eps
        for (_, shares), clip in zip(blocks, clips, strict=True):
            for share in shares:
                share[name] = -rate * clip * share[name] / size


def _second_moments(policy: Policy) -> dict[str, tuple[Tensor, int]]:
    """AdamW's second moment of every tensor that has one, and its number of updates."""
    if policy.agent.ranks > 1:  # each rank holds a part: a checkpoint gathers them
        stored = policy.checkpoint(policy.updates_made).optimizer
    else:
        stored = policy.optimizer_tensors()
    return {
        name: (stored[f"exp_avg_sq/{name}"], int(stored[f"step/{name}"]))
        for name in policy.master
        if f"exp_avg_sq/{name}" in stored
    }
