"""Hand-made agent runs and results of a suite of one team, `pair`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hacrl.config import parse_config
from hacrl.study.compare.reading import AgentRun, Point
from hacrl.study.compare.results import Results, _corrected, _row, difference
from hacrl.study.compare.suite import Run, Suite

CONFIG = parse_config(
    {
        "steps": 9,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
        "agents": [
            {"name": "ant", "model": "pocket:wren"},
            {"name": "bee", "model": "pocket:wren", "learn": False},
        ],
    }
)


def agent_run(arm: str, seed: int, *scores: float, **fields: Any) -> AgentRun:
    """An agent that starts at 0.2 and ends at the mean of these scores, one for each problem."""
    run = Run("pair", arm, seed, Path("out/runs/pair", arm, f"seed-{seed}"), CONFIG)
    curve = (Point(0, 0, 0.0, 0.2), Point(2, 100, 8.0, sum(scores) / len(scores)))
    by_problem = {f"p{i}": score for i, score in enumerate(scores)}
    return AgentRun(
        run, "ant", curve, by_problem, **{"updates": 4, "metrics": {"peers/used": 0.5}} | fields
    )


def results(*agent_runs: AgentRun, reference: str = "alone") -> Results:
    arms = list(dict.fromkeys(r.run.arm for r in agent_runs))
    tables = {"base": {}, "seeds": [1], "reference": reference, "arms": [{"name": a} for a in arms]}
    suite = Suite.model_validate(tables)
    rows = []
    for arm in arms:
        mine = [r for r in agent_runs if r.run.arm == arm]
        against = [r for r in agent_runs if r.run.arm == reference]
        pairs = None if arm == reference else difference(mine, against)
        rows.append(_row(mine, pairs, 1.0, 0.5, Path("out")))
    target = {("pair", "ant"): 0.5}
    return Results(suite, reference, (), tuple(_corrected(rows)), target, (), 4, 1, 0.0, {})
