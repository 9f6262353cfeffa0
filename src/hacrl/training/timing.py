"""Measures the seconds of each phase. Times are stored separately: metrics must not depend on them."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by name.

    Example: with clock("sample"): ...;  clock.read() == {"sample": 0.41}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Return the seconds by name since the last call, and reset them."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
