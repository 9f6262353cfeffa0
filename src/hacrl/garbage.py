"""Pause Python's cyclic garbage collector while many long-lived objects are created."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

FRACTION = 0.01  # largest fraction of the time spent in full collections
_next_collection = 0.0


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the collector in this block: it would scan all live objects again and again.

    Afterwards the new objects count as old, so that the next collection does not scan them. Old
    objects are collected here from time to time, since Python would then rarely do so by itself.
    """
    global _next_collection
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            start = time.monotonic()
            if start >= _next_collection:
                gc.collect()
                end = time.monotonic()
                _next_collection = end + (end - start) / FRACTION
            else:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
