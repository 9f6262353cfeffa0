"""One run, read while another process may write it."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from hacrl.config import Config
from hacrl.store.reader import GROWING, RunReader
from hacrl.store.rows import Row, RowLog

FILES = (*GROWING, "config.toml")
LOCK_SECONDS = 1.0  # how long the answer to "is a process training this run?" is kept


Samples = dict[tuple[str, str, int], Row]
"""(problem, author, index) of a reply -> the row of a learner's sample."""


class LiveRun(RunReader):
    """A run whose growing files are read once; later reads add only the new rows.

    Example: LiveRun.open(Path("runs/team")).metric_rows("train")
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._logs: dict[str, RowLog] = {}
        self._reading = threading.Lock()
        self._config: tuple[object, Config] | None = None
        self._running = (0.0, False)

    def version(self) -> tuple[object, ...]:
        """Changes when one of the growing files, the config or the state does."""
        return (*(stamp(self.path / name) for name in FILES), self.running())

    def changed_at(self) -> float:
        """Time of the last change, in seconds since the epoch."""
        return max(stamp(self.path / name)[2] for name in FILES) / 1e9

    def config(self) -> Config:
        found = stamp(self.config_path)
        if self._config is None or self._config[0] != found:
            self._config = (found, super().config())
        return self._config[1]

    def running(self) -> bool:
        now = time.monotonic()
        if now >= self._running[0]:
            self._running = (now + LOCK_SECONDS, super().running())
        return self._running[1]

    def has_samples(self, step: int) -> bool:
        """Whether samples of a step are stored; where every reply was dropped, their files are empty."""
        return any(self.path.glob(f"samples/*/step-{step:06d}.jsonl"))

    def samples(self, step: int, learner: str) -> Samples:
        """The samples of a learner in a step."""
        rows = self.sample_rows(step, learner)
        return {(row["problem"], row["source"], row["index"]): row for row in rows}

    def _log(self, name: str) -> RowLog:
        return self._logs.setdefault(name, super()._log(name))

    def _read(self, name: str) -> list[Row]:
        with self._reading:
            return super()._read(name)


def stamp(path: Path) -> tuple[Any, ...]:
    """Identity, size and time of a file; zeros without the file."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)
