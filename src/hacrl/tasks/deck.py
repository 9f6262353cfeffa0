"""Dealing problems to steps without any generator state.

All problems are dealt once in a shuffled order, then again in another order, and so on. The order
of each round is a sort by hash, so what a step gets is a pure function of (seed, step, count).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


def hash_number(*parts: object) -> int:
    """64 bits that depend on the parts alone; ("ab", "c") and ("a", "bc") differ."""
    digest = blake2b(digest_size=8)
    for part in parts:
        raw = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little")


def hash_share(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return (hash_number(*parts) >> 11) * 2.0**-53


class Deck:
    """Deals the numbers 0 .. len(ids) - 1 to steps.

    Example: Deck(["a", "b", "c"], seed=0).deal(step=1, count=2) gives the one that step 0 did not
    get and one of the next round that is not the same.
    """

    def __init__(self, ids: Sequence[str], seed: int) -> None:
        self.ids = tuple(ids)
        self.seed = seed
        self._order = lru_cache(maxsize=8)(self._make_order)

    def deal(self, step: int, count: int) -> list[int]:
        """What `step` gets, when every step gets `count`; nothing twice in one step."""
        size = len(self.ids)
        if not 0 <= count <= size:
            raise ValueError(f"cannot deal {count} different ones of {size}")
        start = step * count
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), size)
            taken += self._order(epoch, count)[offset : offset + count - len(taken)]
        return taken

    def _make_order(self, epoch: int, count: int) -> list[int]:
        """The order of one round. The step that crosses into it has already got the last of the
        round before: those may not come first here, they come right after that step's part."""
        size = len(self.ids)
        # The rule needs the last places of the round before, and so that round's order. It moves
        # nothing beyond the first `count` places: of a deck of two steps' size or more, a plain
        # shuffle has the same last places. Otherwise go back to a round that no step crosses into.
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
