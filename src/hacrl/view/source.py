"""What the page can ask for: the calls behind /api/NAME, and what an event stream watches."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hacrl.errors import UserError
from hacrl.types import Problem
from hacrl.view.curves import list_runs, run_figures, series
from hacrl.view.hub import HubSource
from hacrl.view.index import Index
from hacrl.view.library import Library
from hacrl.view.live import LiveRun
from hacrl.view.replies import list_replies, show_problem
from hacrl.view.suite import suite_answer
from hacrl.view.teaching import teaching

Query = Mapping[str, str]


class Source:
    """The data of one page.

    Example: Source(Library.open(Path("runs"))).calls["runs"]({})
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._lock = threading.Lock()
        self._indexes: dict[str, Index] = {}
        self._tasks: dict[str, Any] = {}
        self.calls: dict[str, Callable[[Query], Any]] = {
            "start": self.start,
            "runs": lambda query: list_runs(library),
            "run": lambda query: run_figures(query["id"], self.run(query)),
            "series": lambda query: series(self.run(query), query.get("metric", "reward")),
            "teach": lambda query: teaching(self.run(query), self.index(query)),
            "rollouts": lambda query: list_replies(self.index(query), query),
            "problem": self.problem,
            "suite": self.suite,
        }

    def start(self, query: Query) -> dict[str, Any]:
        """What the page opens with."""
        library = self.library
        ids = {"run": library.runs(), "suite": library.suites()}.get(library.kind, {})
        return {"kind": library.kind, "id": next(iter(ids), None), "root": str(library.root)}

    def run(self, query: Query) -> LiveRun:
        if "id" not in query:
            raise UserError("the address names no run")
        return self.library.run(query["id"])

    def index(self, query: Query) -> Index:
        """The index of a run; the first call starts to build it."""
        run = self.run(query)
        with self._lock:
            if query["id"] not in self._indexes:
                self._indexes[query["id"]] = Index(run)
            index = self._indexes[query["id"]]
        index.start()
        return index

    def problem(self, query: Query) -> dict[str, Any]:
        """All replies to one problem, with its question where the task can be read."""
        run = self.run(query)
        missing = ""
        problems: dict[str, Problem] = {}
        try:
            problems = self.problems(query["id"], run, int(query.get("step") or 0) - 1)
        except (UserError, OSError) as error:
            missing = str(error)
        return show_problem(run, query, problems) | {"missing": missing}

    def problems(self, name: str, run: LiveRun, step: int) -> dict[str, Problem]:
        """The problems of a step by id. No code that a config names is run."""
        from hacrl.tasks import make_task

        config = run.config()
        with self._lock:
            if name not in self._tasks:
                self._tasks[name] = make_task(config.task, config.seed, run.path)
            return {p.id: p for p in self._tasks[name].batch(step, config.problems_per_step)}

    def suite(self, query: Query) -> dict[str, Any]:
        """A comparison: its figures, its report, and the address of each run."""
        name = query.get("id", "")
        folder = self.library.suite(name)
        runs = {self.library.runs()[run].relative_to(folder): run for run in self._below(folder)}
        links = {
            f"{team}/{arm}/{seed.removeprefix('seed-')}": f"#run?{urlencode({'id': run})}"
            for path, run in runs.items()
            for _, team, arm, seed in [path.parts]
        }
        return suite_answer(folder, links)

    def _below(self, folder: Path) -> list[str]:
        """Ids of the runs OUT/runs/TEAM/ARM/seed-N."""
        paths = self.library.runs().items()
        inside = [(name, path) for name, path in paths if path.is_relative_to(folder / "runs")]
        return [name for name, path in inside if len(path.relative_to(folder).parts) == 4]

    def pulse(self, query: Query) -> Any:
        """A value that changes when the watched run, or the list of runs, does."""
        if "id" not in query:
            return {"version": [self._version(name) for name in self.library.runs()]}
        index = self._indexes.get(query["id"])
        progress = index.progress() if index else None
        return {"version": self.run(query).version(), "index": progress}

    def _version(self, name: str) -> Any:
        try:
            return self.library.run(name).version()
        except UserError:  # the list shows why it cannot be read
            return name


def open_source(target: str) -> Source | HubSource:
    """The source of a run, a suite, a folder of runs or the address of a hub; a UserError otherwise."""
    if target.startswith(("http://", "https://")):
        return HubSource(target)
    return Source(Library.open(Path(target)))
