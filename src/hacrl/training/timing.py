"""Where the time goes: one context manager, read once a step. Times never enter the metrics."""

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
        """What was added up since the last reading."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
