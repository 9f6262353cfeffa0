"""What the page can ask for: the runs and suites below a folder, the calls behind /api/NAME, and what an
event stream watches. Only what is found below the folder can be opened through the server."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hacrl.errors import UserError, explain
from hacrl.store.pool import Pool
from hacrl.types import Problem
from hacrl.view.curves import list_run, run_figures, series
from hacrl.view.hub import HubSource
from hacrl.view.index import Index
from hacrl.view.live import LiveRun
from hacrl.view.replies import list_replies, number_in, step_problems
from hacrl.view.suite import read_suite
from hacrl.view.teaching import teaching

DEPTH = 6  # levels of folders that are searched: OUT/runs/TEAM/ARM/seed-N are five
MOST = 20_000  # folders that are looked at
SCAN_SECONDS = 2.0  # how long a list of runs is kept
FIRST_SECONDS = 0.8
"""A list of runs is sent after this time; runs that are not read yet are marked as pending."""

Query = Mapping[str, str]


class Source:
    """The data of one page. Runs and suites have ids: their paths relative to `root`.

    Example: Source(Path("runs")).calls["run"]({"id": "team"})
    """

    def __init__(self, root: Path) -> None:
        """A UserError if `root` is neither a run nor a suite's folder nor a folder of runs."""
        if not root.is_dir():
            hint = " `hacrl train` writes runs/ by default." if root == Path("runs") else ""
            raise UserError(
                f"{root} is not a folder.{hint} Give a run, a folder of runs, a suite's folder or the "
                "address of a hub"
            )
        os.listdir(root)  # an error if it cannot be read
        self.root = root
        self.kind = "suite" if _is_suite(root) else "runs"
        self._lock = threading.Lock()
        self._scanned = (0.0, dict[str, Path](), dict[str, Path]())
        self._runs: dict[str, LiveRun] = {}
        self._indexes: dict[str, Index] = {}
        self._tasks: dict[str, Any] = {}
        self.calls: dict[str, Callable[[Query], Any]] = {
            "start": self.start,
            "runs": self.list_runs,
            "run": lambda query: run_figures(self.run(query), query["id"]),
            "series": lambda query: series(self.run(query), query.get("metric", "reward")),
            "teach": lambda query: teaching(self.run(query), self.index(query)),
            "rollouts": lambda query: list_replies(self.index(query), query),
            "problem": self.problem,
            "suite": self.suite,
        }
        if (root / "config.toml").is_file():
            self.kind = "run"
            list_run(LiveRun.open(root), "")  # an error if it cannot be read
        elif not any(self.found()):
            raise UserError(
                f"{root} holds no run and no suite. `hacrl train` writes run directories, by default "
                "under runs/"
            )

    def found(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Id -> folder of all runs, and of all suites."""
        with self._lock:
            until, runs, suites = self._scanned
            if time.monotonic() >= until:
                runs, suites = {}, {}
                for path, is_run in _walk(self.root):
                    inside = path.relative_to(self.root).as_posix()
                    name = self.root.resolve().name if inside == "." else inside
                    (runs if is_run else suites)[name] = path
                self._scanned = (time.monotonic() + SCAN_SECONDS, runs, suites)
            return runs, suites

    def start(self, query: Query) -> dict[str, Any]:
        """What the page opens with."""
        name = None if self.kind == "runs" else self.root.resolve().name
        return {"kind": self.kind, "id": name}

    def list_runs(self, query: Query) -> dict[str, Any]:
        """Every run with state, accuracy and age, or why it cannot be read; every suite."""
        until = time.monotonic() + FIRST_SECONDS
        runs, suites = self.found()
        rows = [self._listed(name, time.monotonic() < until) for name in runs]
        return {"root": str(self.root), "runs": rows, "suites": list(suites), "now": time.time()}

    def _listed(self, name: str, read: bool) -> dict[str, Any]:
        if not read:
            return {"id": name, "pending": True}
        try:
            return list_run(self.run({"id": name}), name)
        except Exception as error:
            if (message := explain(error)) is None:
                raise
            return {"id": name, "error": message}

    def run(self, query: Query) -> LiveRun:
        """The run that a query names; a UserError if there is none or it cannot be read."""
        name = query.get("id", "")
        if name not in self._runs:
            path = self.found()[0].get(name)
            if path is None:
                raise UserError(f"there is no run {name!r} in {self.root}")
            self._runs.setdefault(name, LiveRun.open(path))
        return self._runs[name]

    def index(self, query: Query) -> Index:
        """The index of a run; the first call starts to build it."""
        run, name = self.run(query), query["id"]
        learners = [agent.name for agent in run.config().agents if agent.learns]
        with self._lock:
            found = self._indexes.get(name)
            if found is None or found.learners != learners:  # another run may have taken its place
                found = self._indexes[name] = Index(run)
                found.start()
            return found

    def problem(self, query: Query) -> dict[str, Any]:
        """All agents' replies to one problem of a step."""
        run, step, name = self.run(query), number_in(query, "step") - 1, query.get("problem", "")
        if Pool(run.pool_path, read_only=True).closed(step):
            for problem in step_problems(run, step, *self.problems(query, step)):
                if problem["problem"] == name:
                    return problem
        raise UserError(f"step {step + 1} has no problem {name!r}")

    def problems(self, query: Query, step: int) -> tuple[dict[str, Problem], str]:
        """The problems of a step by id, or why they cannot be read. No code of a config is run."""
        from hacrl.fingerprint import problems_changed
        from hacrl.tasks import make_task

        run, name = self.run(query), query["id"]
        config = run.config()
        try:
            with self._lock:
                if name not in self._tasks:
                    task = make_task(config.task, config.seed, run.path)
                    if problems_changed(run, config, task):
                        raise UserError("the data has changed since the run was trained")
                    self._tasks[name] = task
                batch = self._tasks[name].batch(step, config.problems_per_step)
                return {problem.id: problem for problem in batch}, ""
        except (UserError, OSError) as error:
            return {}, str(error)

    def suite(self, query: Query) -> dict[str, Any]:
        """A comparison. `base` leads from `root` to its folder; `runs` are the ids of its runs."""
        runs, suites = self.found()
        folder = suites.get(query.get("id", ""))
        if folder is None:
            raise UserError(f"there is no suite {query.get('id')!r} in {self.root}")
        base = "" if folder == self.root else f"{query['id']}/"
        below = [name for name in runs if name.startswith(f"{base}runs/")]
        return {**read_suite(folder), "base": base, "runs": below}

    def pulse(self, query: Query) -> Any:
        """A value that changes when the watched run, or the list of runs, does."""
        if "id" not in query:
            runs = self.found()[0].items()
            return {"version": [self._runs.get(n, LiveRun(path)).version() for n, path in runs]}
        index = self._indexes.get(query["id"])
        progress = index.progress() if index else None
        return {"version": self.run(query).version(), "index": progress}


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


def open_source(target: str) -> Source | HubSource:
    """The source of a run, a suite, a folder of runs or the address of a hub; a UserError otherwise."""
    if target.startswith(("http://", "https://")):
        return HubSource(target)
    return Source(Path(target))
