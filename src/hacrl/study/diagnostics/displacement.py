"""Displacement of the weights by the gradients of a step through AdamW, without changing the weights.

    d = - rate * c * g / (sqrt(v^) + eps),     c = min(1, max_grad_norm / (|G| + 1e-6))

is the whole effect of a part g of an update's gradient G: AdamW's first moment only spreads it over
later updates. v^ is the second moment at the end of the step, if each block of updates makes its U
updates with the same G. One v^ for all makes displacements additive, and no part is divided by almost
zero where the parts of G cancel. Weight decay does not depend on samples and is left out.
"""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

from hacrl.policy.policy import Policy

Gradient = dict[str, Tensor]


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


Moments = Mapping[str, tuple[Tensor, int]]


def _second_moments(policy: Policy) -> Moments:
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
