"""Micro-batches, planned from lengths alone: results do not depend on how a minibatch is split."""

from __future__ import annotations

from collections.abc import Sequence


def plan_microbatches(
    lengths: Sequence[int], max_tokens: int, *, padded: bool = False
) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens, padding included where there is any.

    Longest first, so that a run out of memory happens at once; each row goes where it still fits,
    or, with padding, beside rows of its own length. A row longer than `max_tokens` stands alone.

    Example: plan_microbatches([5, 9, 4, 8], max_tokens=14) == [[1, 0], [3, 2]]
    and padded=True: [[1], [3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    filled: list[int] = []
    for row in order:
        if padded:
            fits = [len(batches) - 1] if batches else []
            fits = [b for b in fits if lengths[batches[b][0]] * (len(batches[b]) + 1) <= max_tokens]
        else:
            fits = [b for b, tokens in enumerate(filled) if tokens + lengths[row] <= max_tokens]
        if fits:
            batches[fits[0]].append(row)
            filled[fits[0]] += lengths[row]
        else:
            batches.append([row])
            filled.append(lengths[row])
    return batches
