"""`hacrl view TARGET --export FILE.html`: the page as one file, with its data."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hacrl.errors import UserError
from hacrl.store.files import steps_in, to_json, write_atomic
from hacrl.store.pool import Pool
from hacrl.view.hub import HubSource
from hacrl.view.page import one_file
from hacrl.view.replies import problem_data, sample_tables
from hacrl.view.source import Source
from hacrl.view.suite import report_page, suite_answer

MOST_REPLIES = 2000  # replies in the file. A longer run has its newest steps.
MOST_NUMBERS = 300_000
"""Values of further metrics in the file; a longer run has the usual charts only."""


def write_export(source: Source | HubSource, path: Path) -> Path:
    """Write the page of a run or a suite to `path` and return it."""
    start = source.calls["start"]({})
    if isinstance(source, HubSource) or start["kind"] == "runs":
        raise UserError("--export needs one run or one suite: give its folder")
    if start["kind"] == "run":
        data = run_data(source, start["id"])
    else:
        return _suite(source.library.suite(start["id"]), path)
    write_atomic(path, one_file(f"{start['id']} · hacrl", json.loads(to_json(data))))
    return path


def _suite(folder: Path, path: Path) -> Path:
    found = suite_answer(folder, {})
    if found["results"] is None:
        raise UserError(f"{folder} has no results.json yet: `hacrl compare` writes it")
    up = Path(os.path.relpath(folder, path.parent)).as_posix()
    up = "" if up == "." else f"{up}/"
    write_atomic(
        path, report_page(folder.resolve().name, found["results"], found["report"] or "", up)
    )
    return path


def run_data(source: Source, name: str) -> dict[str, Any]:
    """The answers that the pages of a run ask for, and its newest problems."""
    query = {"id": name}
    run, index = source.run(query), source.index(query)
    index.refresh()
    figures = source.calls["run"](query)
    answers = {"run": figures, "teach": source.calls["teach"](query)}
    metrics = figures["metrics"]
    if len(metrics) * len(figures["x"]) * len(figures["agents"]) > MOST_NUMBERS:
        metrics = []
    for metric in metrics:
        answers[f"series {metric}"] = source.calls["series"]({**query, "metric": metric})
    problems, first, steps = [], 0, steps_in(run.pool_path)
    for step in reversed(steps):
        found = list(_problems(source, name, step))
        problems += found
        first = step
        if sum(len(problem["replies"]) for problem in problems) >= MOST_REPLIES:
            break
    partial = f"This file has the replies of steps {first + 1} to {steps[-1] + 1}." if first else ""
    return {
        "start": f"#run?{urlencode(query)}",
        "answers": answers,
        "metrics": metrics,
        "problems": problems,
        "partial": partial,
    }


def _problems(source: Source, name: str, step: int) -> Iterator[dict[str, Any]]:
    run = source.run({"id": name})
    pool = Pool(run.pool_path, read_only=True)
    if not pool.closed(step):
        return
    try:
        problems = source.problems(name, run, step)
    except (UserError, OSError):
        problems = {}
    tables = sample_tables(run, step)
    groups = pool.snapshot(step).groups
    for place, group in enumerate(groups):
        yield problem_data(run, step, group, tables, problems) | {
            "before": groups[place - 1].problem_id if place else None,
            "after": groups[place + 1].problem_id if place + 1 < len(groups) else None,
            "place": [place + 1, len(groups)],
        }
