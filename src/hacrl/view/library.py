"""The runs and suites below a folder. Only what is found here can be opened through the server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hacrl.errors import UserError
from hacrl.view.live import LiveRun

DEPTH = 6  # levels of folders that are searched: OUT/runs/TEAM/ARM/seed-N are five
MOST = 20_000  # folders that are looked at
SCAN_SECONDS = 2.0  # how long a list of runs is kept


class Library:
    """Runs and suites, by ids that the page uses: paths relative to `root`.

    Example: Library.open(Path("runs")).run("team").steps_done()
    """

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind  # kind: what `root` is: run, suite or runs
        self._lock = threading.Lock()
        self._found: tuple[float, dict[str, Path], dict[str, Path]] = (0.0, {}, {})
        self._open: dict[str, LiveRun] = {}

    @classmethod
    def open(cls, path: Path) -> Library:
        """The library of a run, a suite's folder or a folder of runs; a UserError for other paths."""
        if path.suffix == ".toml" and path.is_file():  # the suite file of `hacrl compare`
            path = Path("runs") / "compare" / path.stem
        if not path.is_dir():
            hint = " `hacrl train` writes runs/ by default." if path == Path("runs") else ""
            raise UserError(
                f"{path} is not a folder.{hint} Give a run, a folder of runs, a suite's folder or the "
                "address of a hub"
            )
        os.listdir(path)  # an error if it cannot be read
        if _is_run(path) or (path / "config.toml").is_file():
            run = LiveRun.open(path)
            run.config()
            run.metric_rows()
            library = cls(path, "run")
        else:
            library = cls(path, "suite" if _is_suite(path) else "runs")
            if not library.runs() and not library.suites():
                raise UserError(
                    f"{path} holds no run and no suite. `hacrl train` writes run directories, by "
                    "default under runs/"
                )
        return library

    def runs(self) -> dict[str, Path]:
        """Id -> run directory."""
        return self._scanned()[1]

    def suites(self) -> dict[str, Path]:
        """Id -> folder of a suite."""
        return self._scanned()[2]

    def run(self, name: str) -> LiveRun:
        """The run with this id; a UserError if there is none or it cannot be read."""
        with self._lock:
            if name in self._open:
                return self._open[name]
        path = self.runs().get(name)
        if path is None:
            raise UserError(f"there is no run {name!r} in {self.root}")
        run = LiveRun.open(path)
        with self._lock:
            return self._open.setdefault(name, run)

    def suite(self, name: str) -> Path:
        """The folder of the suite with this id."""
        if name not in self.suites():
            raise UserError(f"there is no suite {name!r} in {self.root}")
        return self.suites()[name]

    def _scanned(self) -> tuple[float, dict[str, Path], dict[str, Path]]:
        with self._lock:
            if time.monotonic() >= self._found[0]:
                runs: dict[str, Path] = {}
                suites: dict[str, Path] = {}
                for path, is_run in _walk(self.root):
                    (runs if is_run else suites)[self._id(path)] = path
                self._found = (time.monotonic() + SCAN_SECONDS, runs, suites)
            return self._found

    def _id(self, path: Path) -> str:
        inside = path.relative_to(self.root).as_posix()
        return self.root.resolve().name if inside == "." else inside


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is a run) of every run and suite at or below `root`, in order of names."""
    for looked_at, (here, folders, _) in enumerate(os.walk(root)):
        path = Path(here)
        if _is_run(path):
            yield path, True
            folders.clear()
        elif _is_suite(path):
            yield path, False
        if looked_at > MOST or len(path.relative_to(root).parts) >= DEPTH:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _is_run(path: Path) -> bool:
    if not (path / "config.toml").is_file():
        return False
    return any((path / name).exists() for name in ("environment.json", "metrics.jsonl", "pool"))


def _is_suite(path: Path) -> bool:
    written = ("results.json", "report.md", "suite.toml")
    return (path / "runs").is_dir() and any((path / name).is_file() for name in written)
