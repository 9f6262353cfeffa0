"""Python's search for garbage, kept from where there is none to find."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.01
"""Of the time, at most, for searches among everything that the process has."""
_next_search = 0.0


@contextmanager
def no_garbage() -> Iterator[None]:
    """Many objects are made and none is let go: looking for garbage among them, and from time to time
    among everything that the process has, takes a third of the time and more."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            _put_away()
            gc.enable()


def _put_away() -> None:
    """What was made counts as old, or the next search, which is due at once, would go through it all.
    Python then does not come to search what is old by itself, so that is done here, now and then."""
    global _next_search
    begun = time.monotonic()
    if begun >= _next_search:
        gc.collect()
        done = time.monotonic()
        _next_search = done + (done - begun) / SHARE
    else:
        gc.freeze()
        gc.unfreeze()
