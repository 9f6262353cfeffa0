"""Work dealt over the ranks of a group, and their results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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


def deal_prompts(
    prompts: Sequence[tuple[int, ...]], costs: Sequence[int], ranks: int, at_least: int = 1
) -> list[list[int]]:
    """Which items each rank takes, each with its prompt and what it costs beside that. Those of one
    prompt stay together, because it is read once for all of them; unless there are fewer than so many
    prompts a rank, and some ranks would have much more than others.

    Example: deal_prompts([(7, 8), (7, 8), (9,)], [3, 3, 4], 2) == [[0, 1], [2]]
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        together.setdefault(prompt, []).append(i)
    groups = list(together.values())
    if len(groups) < at_least * ranks:
        groups = [[i] for i in range(len(prompts))]
    total = [len(prompts[g[0]]) + sum(costs[i] for i in g) for g in groups]
    return [sorted(i for g in hand for i in groups[g]) for hand in deal(total, ranks)]


def in_order(hands: Sequence[Sequence[int]], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The ranks' results in the order of what was dealt; empty where nothing was collected."""
    placed = {
        i: value
        for hand, part in zip(hands, parts, strict=False)
        for i, value in zip(hand, part, strict=True)
    }
    return [placed[i] for i in sorted(placed)]
