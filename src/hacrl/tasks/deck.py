"""Deals problems to steps without generator state.

All problems are dealt once in a shuffled order, then again in another order, and so on. The order of
each epoch is a sort by hash, so the problems of a step are a pure function of (seed, step, count).
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from hacrl.errors import UserError


def hash_number(*parts: object) -> int:
    """A 64-bit hash of the parts alone; ("ab", "c") and ("a", "bc") differ."""
    digest = blake2b(digest_size=8)
    for part in parts:
        raw = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little")


def hash_fraction(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return (hash_number(*parts) >> 11) * 2.0**-53


def check_count(count: int, size: int, of: str) -> None:
    """UserError unless a step's `count` problems are between 1 and `size`."""
    if not 1 <= count <= size:
        raise UserError(
            f"prompts_per_step = {count} is not between 1 and {size}, the number of {of}. Lower "
            "prompts_per_step (under gspo-dynamic also algorithm.list_factor, which multiplies it), or "
            "give the task more problems."
        )


class Deck:
    """Deals the indices 0 .. len(ids) - 1 to steps.

    Example: Deck(["a", "b", "c"], seed=0).deal(step=1, count=2) gives the index that step 0 did not
    get and a different one from the next epoch.
    """

    def __init__(self, ids: Sequence[str], seed: int) -> None:
        self.ids = tuple(ids)
        self.seed = seed
        self._order = lru_cache(maxsize=8)(self._make_order)

    def deal(self, step: int, count: int) -> list[int]:
        """The indices of `step` if every step gets `count`; no index twice in one step. At
        most as many as there are."""
        size = len(self.ids)
        start = step * count
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), size)
            taken += self._order(epoch, count)[offset : offset + count - len(taken)]
        return taken

    def _make_order(self, epoch: int, count: int) -> list[int]:
        """The order of one epoch. The step that crosses into it already has the last indices of the
        previous epoch, so these come after that step's part of this epoch."""
        size = len(self.ids)
        # This needs the end of the previous epoch, and so that epoch's order. The rule changes only
        # the first `count` places: with size >= 2 * count a plain shuffle has the same end.
        # Otherwise go back to an epoch that no step crosses into.
        first = epoch
        while first * size % count and (size < 2 * count or first == epoch):
            first -= 1
        order = self._shuffled(first)
        for later in range(first + 1, epoch + 1):
            carried = later * size % count
            last = set(order[size - carried :])
            plain = self._shuffled(later)
            head = [i for i in plain if i not in last][: count - carried]
            taken = set(head)
            order = head + [i for i in plain if i not in taken]
        return order

    def _shuffled(self, epoch: int) -> list[int]:
        keys = [hash_number("deal", self.seed, epoch, name) for name in self.ids]
        return sorted(range(len(keys)), key=lambda i: (keys[i], i))
