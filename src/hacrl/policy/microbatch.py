"""Planning of micro-batches from lengths and prompts. Results depend on the split only by
rounding, but in half precision clip decisions may differ (update.py)."""

from collections import defaultdict
from collections.abc import Sequence

PROMPT_COPY = 8
"""Every row with a shared prompt has its own copy of the prompt's keys and values: at most an eighth of
the memory that a token needs for the backward."""


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    padded: bool = False,
    prompts: Sequence[tuple[int, ...]] | None = None,
) -> list[list[int]]:
    """Split rows into micro-batches of at most `max_tokens` tokens, including padding if `padded`.

    Longest rows first, so that a lack of memory shows at once. Each row goes into the first micro-batch
    with room, or, with padding, next to rows of similar length. A row longer than `max_tokens` is alone.
    With `prompts`, a prompt counts once per micro-batch, so its rows go where the prompt is already.
    Without padding the micro-batches are about equally full.

    Example: plan_microbatches([5, 9, 4, 8], max_tokens=14) == [[1, 0], [3, 2]]
    and padded=True: [[1], [3], [0, 2]]
    """
    if padded:
        return _padded(lengths, max_tokens)
    begins = prompts or [()] * len(lengths)
    batches, filled = _packed(lengths, max_tokens, begins)
    if len(batches) > 1:
        # A small last micro-batch takes a GPU nearly as long as a full one: the host's work is the same.
        enough = sum(filled) // len(batches) + max(lengths)
        even, _ = _packed(lengths, min(enough, max_tokens), begins)
        if len(even) <= len(batches):
            return even
    return batches


def _packed(
    lengths: Sequence[int], max_tokens: int, begins: Sequence[tuple[int, ...]]
) -> tuple[list[list[int]], list[int]]:
    """Micro-batches and the tokens counted in each."""
    longest: dict[tuple[int, ...], int] = defaultdict(int)
    for length, begin in zip(lengths, begins, strict=True):
        longest[begin] = max(longest[begin], length)
    first = {begin: rank for rank, begin in enumerate(sorted(longest, key=lambda b: -longest[b]))}
    order = sorted(range(len(lengths)), key=lambda row: (first[begins[row]], -lengths[row], row))
    batches: list[list[int]] = []
    filled: list[int] = []
    holding: dict[tuple[int, ...], list[int]] = defaultdict(
        list
    )  # micro-batches that contain the prompt
    for row in order:
        begin = begins[row]
        more = lengths[row] - len(begin) + len(begin) // PROMPT_COPY
        fits = [b for b in holding[begin] if begin and filled[b] + more <= max_tokens]
        if not fits:
            more = lengths[row]
            fits = [b for b, tokens in enumerate(filled) if tokens + more <= max_tokens]
        if not fits:
            fits = [len(batches)]
            batches.append([])
            filled.append(0)
        if fits[0] not in holding[begin]:
            holding[begin].append(fits[0])
        batches[fits[0]].append(row)
        filled[fits[0]] += more
    return batches, filled


def _padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        last = batches[-1] if batches else []
        if last and lengths[last[0]] * (len(last) + 1) <= max_tokens:
            last.append(row)
        else:
            batches.append([row])
    return batches
