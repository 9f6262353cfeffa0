"""Work dealt over the ranks of a group, and their results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hacrl.policy.sampling.sampler import Request
from hacrl.policy.update import Sums


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which items each rank takes, so that the costs are about equal: the largest first, each to the
    rank that has least.

    Example: deal([5, 9, 4, 8], 2) == [[1, 2], [0, 3]]
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = totals.index(min(totals))
        hands[rank].append(item)
        totals[rank] += costs[item]
    return [sorted(hand) for hand in hands]


def deal_prompts(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Which requests each rank takes. Those of one prompt stay together, because a prompt is read
    once for all of them; unless there are fewer prompts than ranks."""
    prompts: dict[Any, list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(request.prompt_ids, []).append(i)
    groups = list(prompts.values())
    if len(groups) < ranks:
        groups = [[i] for i in range(len(requests))]
    costs = [sum(len(requests[i].prompt_ids) + requests[i].limit for i in g) for g in groups]
    return [sorted(i for g in hand for i in groups[g]) for hand in deal(costs, ranks)]


def in_order(hands: Sequence[Sequence[int]], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The ranks' results in the order of what was dealt; empty where nothing was collected."""
    placed = {
        i: value
        for hand, part in zip(hands, parts, strict=False)
        for i, value in zip(hand, part, strict=True)
    }
    return [placed[i] for i in sorted(placed)]


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """Numbers add up; of each sample's facts those of the rank that had it are taken."""

    def merged(values: list[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(
                next((v for v in column if v is not None), None)
                for column in zip(*values, strict=True)
            )
        return sum(values)

    return Sums(**{f.name: merged([getattr(p, f.name) for p in parts]) for f in fields(Sums)})
