"""Python's search for garbage, kept from where there is none to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
        gc.freeze()
        gc.unfreeze()
        if was:
            gc.enable()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """It looks among what is made inside, such as graphs, whose memory must come back, and not among
    what was there before: a step's samples and everything else that the process has."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
