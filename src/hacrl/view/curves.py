"""The figures of a run and of its line in the list of runs, as plain data for the page.

Steps count from 1 here. Lists of values are parallel to a list of steps; missing values are None.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.replies import score_name
from hacrl.store.rows import Row
from hacrl.view.live import LiveRun

SHOWN = ("reward", "loss", "grad_norm", "own/ratio", "peers/used", "reply_tokens", "truncated")
"""Metrics of a run's page. Others are fetched by name."""

Values = list[float | None]


def list_run(run: LiveRun, name: str) -> dict[str, Any]:
    """A run in the list of runs: state, accuracy and age."""
    config = run.config()
    return {
        "id": name,
        "state": run.state(),
        "algorithm": config.algorithm.name,
        "agents": [agent.name for agent in config.agents],
        "done": run.steps_done(),
        "steps": config.steps,
        "changed": run.changed_at(),
        "notes": len(run.notes()),
        **_evaluations(run),
    }


def _evaluations(run: LiveRun) -> dict[str, Any]:
    """right: whether an evaluation's mean is an accuracy, else it is a mean reward. accuracy: agent ->
    [steps done, mean, low, high] of each evaluation; an accuracy's interval is cut at 0 and 1."""
    right = bool(score_name(run.config().verifier.kind)[1])
    found: dict[str, list[Values]] = defaultdict(list)
    for row in sorted(run.metric_rows("evaluation"), key=lambda row: int(row["step"])):
        if row["accuracy"] is not None:
            mean, low, high = (row[key] for key in ("accuracy", "accuracy/low", "accuracy/high"))
            if right and low is not None:
                low, high = max(0.0, low), min(1.0, high)
            found[row["agent"]].append([row["step"], *map(short, (mean, low, high))])
    return {"right": right, "accuracy": found}


def run_figures(run: LiveRun, name: str) -> dict[str, Any]:
    """Everything on the page of one run, but for its replies."""
    config = run.config()
    steps, table = train_table(run)
    rows = [row for found in table.values() for row in found.values()]
    metrics = {
        key
        for key in set[str]().union(*rows)
        if any(short(row.get(key)) is not None for row in reversed(rows))
    }
    return {
        **list_run(run, name),
        "path": str(run.path),
        "now": time.time(),
        "task": config.task.kind,
        "seed": config.seed,
        "agents": [{"name": a.name, "model": a.model, "learns": a.learns} for a in config.agents],
        "x": [step + 1 for step in steps],
        "series": {key: columns(table, steps, key) for key in SHOWN},
        "ratios": {
            f"{learner} ← {source}": values
            for source in table
            for learner, values in columns(table, steps, f"ratio/{source}").items()
            if learner != source
        },
        "phases": _phases(run, steps),
        "rollouts": sum(row.get("rollouts", 0) for row in rows),
        "notes": [[row["step"], row["text"]] for row in run.notes()],
        "metrics": sorted(metrics - {"step"}),
    }


def series(run: LiveRun, metric: str) -> dict[str, Any]:
    """One metric of every agent by step."""
    steps, table = train_table(run)
    return {"x": [step + 1 for step in steps], "agents": columns(table, steps, metric)}


def train_table(run: LiveRun) -> tuple[list[int], dict[str, dict[int, Row]]]:
    """The steps of a run, and agent -> step -> its row in the order of the team."""
    table: dict[str, dict[int, Row]] = {agent.name: {} for agent in run.config().agents}
    for row in run.metric_rows("train"):
        table.setdefault(row["agent"], {})[row["step"]] = row
    return sorted({step for rows in table.values() for step in rows}), table


def column(rows: Mapping[int, Row], steps: Sequence[int], key: str) -> Values:
    """The values of an agent, by step."""
    return [short(rows[step].get(key)) if step in rows else None for step in steps]


def columns(
    table: Mapping[str, Mapping[int, Row]], steps: Sequence[int], key: str
) -> dict[str, Values]:
    """Agent -> its values; agents without a value are left out."""
    found = {agent: column(rows, steps, key) for agent, rows in table.items()}
    return {agent: values for agent, values in found.items() if any(v is not None for v in values)}


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
