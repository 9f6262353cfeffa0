"""Python's search for garbage, kept from where there is none to find."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.01
"""Of the time, at most, for searches among everything that the process has."""

_inside = 0
"""How many blocks of `only_new_garbage` are open."""
_next_search = 0.0


@contextmanager
def no_garbage() -> Iterator[None]:
    """Many objects are made and none is let go: looking for garbage among them, and from time to time
    among everything that the process has, takes a third of the time and more. Afterwards they count as
    old, or the next search, which is due at once, would go through them all."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not _inside:
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """It looks among what is made inside, such as graphs, whose memory must come back, and not among
    what was there before: a step's samples and everything else that the process has.

    Python does not come to search those by itself any more, so that is done here, before the block, as
    often as it takes little of the time.
    """
    global _inside, _next_search
    if not _inside and (begun := time.monotonic()) >= _next_search:
        gc.collect()
        done = time.monotonic()
        _next_search = done + (done - begun) / SHARE
    gc.freeze()
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1
        if not _inside:
            gc.unfreeze()
