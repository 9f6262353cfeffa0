"""Python's search for garbage, where there is none to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            gc.enable()
