"""docs/metrics.md has every metric that a run writes, and the code has every metric of the page."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import team

import hacrl
from hacrl.runs import start
from hacrl.store.reader import RunReader
from hacrl.training.agent import Agent
from hacrl.training.hooks import Hooks
from hacrl.types import Trajectory

SRC = Path(hacrl.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
METRICS = re.findall(r"^\| `([^`]+)` \| \S", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
PATTERNS = [re.sub(r"[A-Z]+", "[^/]+", name.replace("TASK", ".+")) for name in METRICS]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "diagnostics": {"every": 1, "problems": 2, "samples": 2},
            "trust": {"judge_again": True, "quarantine": True, "max_source_weight": 0.3},
        },
        {"algorithm": {"name": "gspo-dynamic"}},
    ],
)
def test_every_metric_of_a_run_has_a_meaning(tmp_path: Path, settings: dict[str, Any]) -> None:
    agents = team.member("wren"), team.member("finch", publish="successes")
    config = team.team(*agents, steps=2, evaluation={"problems": 4}, **settings)
    names = names_in(hacrl.train(config, tmp_path / "run"))
    assert len(names) > 50
    assert unknown(names) == []


def test_metrics_of_stored_replies_and_of_invalid_rows(tmp_path: Path) -> None:
    """heron's rows name another temperature, so wren leaves them out."""

    def other_temperature(agent: Agent, step: int, rows: list[Trajectory]) -> list[Trajectory]:
        if agent.name == "wren":
            return rows
        return [replace(t, sampling=replace(t.sampling, temperature=0.5)) for t in rows]

    settings: dict[str, Any] = {"steps": 1, "evaluation": {"problems": 0}}
    stored = hacrl.train(team.team(team.member("finch"), **settings), tmp_path / "stored")
    agents = team.member("wren"), team.member("heron"), {"name": "old", "replay": str(stored.path)}
    hooks = Hooks(tamper=other_temperature)
    made = start(team.team(*agents, **settings), tmp_path / "run", hooks=hooks)
    names = names_in(made)
    assert {"replayed", "samples/invalid/temperature"} <= names
    assert unknown(names) == []


def names_in(run: RunReader) -> set[str]:
    return {name for row in run.metric_rows() for name in row}


def unknown(names: set[str]) -> list[str]:
    """The names that the page does not have."""
    return sorted(n for n in names if not any(re.fullmatch(pattern, n) for pattern in PATTERNS))


def test_every_metric_of_the_page_is_in_the_code() -> None:
    """Each part of the name before a placeholder, as text in the source."""
    source = "\n".join(p.read_text() for p in SRC.rglob("*.py"))
    assert len(METRICS) == len(set(METRICS)) > 100
    for name in METRICS:
        fixed = re.split(r"[A-Z]", name)[0]
        assert all(part in source for part in fixed.split("/")), name
