"""Splits rows over the ranks of a process group, and puts their results in order again."""

from collections.abc import Sequence
from typing import Any


def balance(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Item indices of each rank with about equal total costs: largest items first, each to the rank
    with the smallest total.

    Example: balance([5, 9, 4, 8], 2) == [[1, 2], [0, 3]]
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = totals.index(min(totals))
        parts[rank].append(item)
        totals[rank] += costs[item]
    return [sorted(part) for part in parts]


def split_rows(
    prompts: Sequence[tuple[int, ...]], costs: Sequence[int], ranks: int, min_prompts: int = 1
) -> list[list[int]]:
    """Row indices of each rank. `costs` are the tokens of each row without its prompt.

    Rows of one prompt stay on one rank, which computes the prompt once. With fewer than `min_prompts`
    prompts per rank the rows are split one by one, because whole prompts would be uneven.

    Example: split_rows([(7, 8), (7, 8), (9,)], [3, 3, 4], 2) == [[0, 1], [2]]
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(i)
    units = list(by_prompt.values())
    if len(units) < min_prompts * ranks:
        units = [[i] for i in range(len(prompts))]
    total = [len(prompts[rows[0]]) + sum(costs[i] for i in rows) for rows in units]
    return [sorted(i for u in part for i in units[u]) for part in balance(total, ranks)]


def in_order(parts: Sequence[Sequence[int]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """The ranks' results in the order of the rows; empty if `results` is, as on ranks other than 0."""
    by_row = {
        i: value
        for part, values in zip(parts, results, strict=False)
        for i, value in zip(part, values, strict=True)
    }
    return [by_row[i] for i in sorted(by_row)]
