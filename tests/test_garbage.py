"""What Python's search for garbage sees in a step."""

from __future__ import annotations

import gc
import time
import weakref

from hacrl import garbage
from hacrl.garbage import no_garbage


class Knot:
    """Refers to itself, so that only the search can let it go."""

    def __init__(self) -> None:
        self.me = self


def knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def test_no_search_for_a_while_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with no_garbage(), no_garbage():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_made_meanwhile_is_not_searched_at_once(monkeypatch) -> None:
    searches: list[str] = []
    gc.collect()
    monkeypatch.setattr(garbage, "_next_search", float("inf"))
    gc.callbacks.append(lambda phase, _: searches.append(phase))
    try:
        with no_garbage():
            made = [[] for _ in range(5000)]
            assert gc.get_count()[0] >= 5000  # far above what a search is due at
        more = [[] for _ in range(100)]
    finally:
        gc.callbacks.pop()
    assert not searches and len(made + more) == 5100
    assert gc.get_freeze_count() == 0
    lost = knot()
    gc.collect()
    assert lost() is None


def test_old_garbage_goes_too_but_seldom(monkeypatch) -> None:
    """Putting away keeps Python from ever searching what is old."""
    monkeypatch.setattr(garbage, "_next_search", 0.0)
    with no_garbage():
        pass
    assert garbage._next_search > time.monotonic()  # a search took some time
    gc.collect(1)  # so that none is due of itself
    lost = knot()
    with no_garbage():
        pass
    assert lost() is not None
    monkeypatch.setattr(garbage, "_next_search", 0.0)
    with no_garbage(), no_garbage():
        pass
    assert lost() is None
