"""`hacrl view RUN --export FILE.html`: the page as one file, with its data."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hacrl.errors import UserError
from hacrl.store.files import steps_in, to_json, write_atomic
from hacrl.store.pool import Pool
from hacrl.view.hub import HubSource
from hacrl.view.page import one_file
from hacrl.view.replies import step_problems
from hacrl.view.source import Source

MOST_REPLIES = 2000  # replies in the file. A longer run has its newest steps.


def write_export(source: Source | HubSource, path: Path) -> Path:
    """Write the page of a run to `path` and return it."""
    if isinstance(source, HubSource) or source.kind != "run":
        raise UserError("--export needs one run: give its folder. A suite has its report.html")
    name = source.start({})["id"]
    write_atomic(path, one_file(f"{name} · hacrl", json.loads(to_json(_data(source, name)))))
    return path


def _data(source: Source, name: str) -> dict[str, Any]:
    """The answers that the pages of a run ask for, and its newest problems."""
    query = {"id": name}
    run = source.run(query)
    source.index(query).refresh()
    pool = Pool(run.pool_path, read_only=True)
    steps = [step for step in steps_in(run.pool_path) if pool.closed(step)]
    problems: list[dict[str, Any]] = []
    first, replies = 0, 0
    for first in reversed(steps):
        found = list(step_problems(run, first, *source.problems(query, first)))
        problems += found
        replies += sum(len(problem["replies"]) for problem in found)
        if replies >= MOST_REPLIES:
            break
    partial = f"This file has the replies of steps {first + 1} to {steps[-1] + 1}." if first else ""
    return {
        "start": f"#run?{urlencode(query)}",
        "answers": {name: source.calls[name](query) for name in ("run", "teach")},
        "problems": problems,
        "partial": partial,
    }
