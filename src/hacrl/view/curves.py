"""The figures of a run and of a list of runs, as plain data for the page.

Steps count from 1 here. Lists of values are parallel to a list of steps; missing values are None.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hacrl.config import Config
from hacrl.errors import EXIT_USER, exit_code, explain
from hacrl.replies import score_name
from hacrl.store.rows import Row
from hacrl.view.library import Library
from hacrl.view.live import LiveRun

SHOWN = (
    "reward",
    "loss",
    "grad_norm",
    "own/ratio",
    "own/clipped",
    "peers/used",
    "peers/effective_samples",
    "reply_tokens",
    "truncated",
)
"""Metrics of a run's page. Others are fetched by name."""
FIRST_SECONDS = 0.8
"""A list of runs is sent after this time; runs that are not read yet are marked as pending."""
STEP, AGENT = "step", "agent"


def list_runs(library: Library) -> dict[str, Any]:
    """Every run with state, accuracy and age, or why it cannot be read; every suite."""
    until = time.monotonic() + FIRST_SECONDS
    rows = [_listed(library, name, time.monotonic() < until) for name in library.runs()]
    return {
        "root": str(library.root),
        "kind": library.kind,
        "runs": rows,
        "suites": [{"id": name} for name in library.suites()],
        "now": time.time(),
    }


def _listed(library: Library, name: str, read: bool) -> dict[str, Any]:
    if not read:
        return {"id": name, "pending": True}
    try:
        run = library.run(name)
        config = run.config()
        return {
            "id": name,
            "state": run.state(),
            "algorithm": config.algorithm.name,
            "seed": config.seed,
            "right": _right_or_wrong(config),
            "agents": [agent.name for agent in config.agents],
            "done": run.steps_done(),
            "steps": config.steps,
            "changed": run.changed_at(),
            "accuracy": _accuracies(run.metric_rows("evaluation"), _right_or_wrong(config)),
            "notes": len(run.notes()),
        }
    except Exception as error:
        return {"id": name, "error": one_sentence(error)}


def _right_or_wrong(config: Config) -> bool:
    """Whether an evaluation's mean is an accuracy; else it is a mean reward."""
    return bool(score_name(config.verifier.kind)[1])


def one_sentence(error: BaseException) -> str:
    """The message of an error that the user can fix; other errors are raised again."""
    message = explain(error)
    if message is None or exit_code(error) != EXIT_USER:
        raise error
    return message


def _accuracies(rows: Sequence[Row], right: bool) -> dict[str, list[list[float | None]]]:
    """Agent -> [steps done, accuracy, low, high] of each evaluation, by step. The interval of an
    accuracy is cut at 0 and 1."""
    found: dict[str, list[list[float | None]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row[STEP])):
        if row["accuracy"] is not None:
            mean, low, high = (row[key] for key in ("accuracy", "accuracy/low", "accuracy/high"))
            if right and low is not None:
                low, high = max(0.0, low), min(1.0, high)
            found[row[AGENT]].append([row[STEP], *map(short, (mean, low, high))])
    return dict(found)


def run_figures(name: str, run: LiveRun) -> dict[str, Any]:
    """Everything on the page of one run, but for its replies."""
    config = run.config()
    train = run.metric_rows("train")
    steps = sorted({row[STEP] for row in train})
    table = by_agent(train, config)
    return {
        "id": name,
        "path": str(run.path),
        "state": run.state(),
        "changed": run.changed_at(),
        "now": time.time(),
        "algorithm": config.algorithm.name,
        "task": config.task.kind,
        "seed": config.seed,
        "right": _right_or_wrong(config),
        "steps": config.steps,
        "done": 1 + max(steps, default=-1),
        "agents": [{"name": a.name, "model": a.model, "learns": a.learns} for a in config.agents],
        "x": [step + 1 for step in steps],
        "series": {key: columns(table, steps, key) for key in SHOWN},
        "ratios": {
            f"{learner} ← {source}": column(rows, steps, f"ratio/{source}")
            for learner, rows in table.items()
            for source in table
            if source != learner and any(f"ratio/{source}" in row for row in rows.values())
        },
        "accuracy": _accuracies(run.metric_rows("evaluation"), _right_or_wrong(config)),
        "phases": _phases(run, steps),
        "rollouts": sum(row.get("rollouts", 0) for row in train),
        "notes": [[row[STEP], row["text"]] for row in run.notes()],
        "metrics": sorted({key for row in train[-2 * len(table) :] for key in numbers(row)}),
    }


def series(run: LiveRun, metric: str) -> dict[str, Any]:
    """One metric of every agent by step."""
    train = run.metric_rows("train")
    steps = sorted({row[STEP] for row in train})
    table = by_agent(train, run.config())
    return {"x": [step + 1 for step in steps], "agents": columns(table, steps, metric)}


def by_agent(rows: Iterable[Row], config: Config) -> dict[str, dict[int, Row]]:
    """Agent -> step -> its row, in the order of the team."""
    table: dict[str, dict[int, Row]] = {agent.name: {} for agent in config.agents}
    for row in rows:
        table.setdefault(row[AGENT], {})[row[STEP]] = row
    return table


def column(rows: Mapping[int, Row], steps: Sequence[int], key: str) -> list[float | None]:
    return [short(rows[step].get(key)) if step in rows else None for step in steps]


def columns(
    table: Mapping[str, Mapping[int, Row]], steps: Sequence[int], key: str
) -> dict[str, list[float | None]]:
    """Agent -> its values; agents without a value are left out."""
    found = {agent: column(rows, steps, key) for agent, rows in table.items()}
    return {agent: values for agent, values in found.items() if any(v is not None for v in values)}


def numbers(row: Row) -> list[str]:
    """Keys of a row whose values are numbers."""
    return [k for k, v in row.items() if isinstance(v, (int, float)) and k not in (STEP, AGENT)]


def _phases(run: LiveRun, steps: Sequence[int]) -> dict[str, list[float]]:
    """Phase -> seconds of all agents by step."""
    place = {step: i for i, step in enumerate(steps)}
    found: dict[str, list[float]] = {}
    for (step, _, phase), seconds in run.times().items():
        if step in place:
            found.setdefault(phase, [0.0] * len(steps))[place[step]] += seconds
    return {phase: [short(v) or 0.0 for v in values] for phase, values in found.items()}


def short(value: Any) -> float | None:
    """A number with at most six digits, to send less; None for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(f"{value:.6g}")
