"""Micro-batches, planned from lengths alone: results do not depend on how a minibatch is split."""

from __future__ import annotations

from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens, padding included.

    Rows of similar length go together, longest first, so that a run out of memory happens at once.
    A row longer than `max_tokens` stands alone.

    Example: plan_microbatches([5, 9, 4, 8], max_tokens=18) == [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
