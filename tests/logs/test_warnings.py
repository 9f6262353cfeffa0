"""A run that shares next to nothing says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hacrl.config import parse_config
from hacrl.logs.warnings import UnusedPeersWatch
from hacrl.store.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    settings = {
        "steps": 9,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
        "agents": [{"name": n, "model": "pocket:wren"} for n in ("ant", "bee")],
    }
    return RunDirectory.create(tmp_path / "run", parse_config(settings))


def row(
    step: int, used: float, below: float = 0.9, agent: str = "ant", n: int = 64
) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "agent": agent,
        "peers/forwarded": n,
        "peers/used": used,
        "peers/below_floor": below,
    }


def warnings(run: RunDirectory, rows: list[dict[str, Any]]) -> list[str]:
    watch = UnusedPeersWatch(run)
    return [sentence for one in rows for sentence in watch.look([one])]


def test_each_learner_is_warned_about_once_after_five_steps(run: RunDirectory) -> None:
    """bee uses a tenth of its peers' samples: that is something."""
    rows = [row(s, u, agent=a) for s in range(9) for a, u in (("ant", 0.01), ("bee", 0.1))]
    watch = UnusedPeersWatch(run)
    found = {}
    for step in range(9):
        for sentence in watch.look(rows[2 * step : 2 * step + 2]):
            found[step] = sentence
    assert list(found) == [4]
    assert found[4].startswith(
        "ant learns almost nothing from its peers: only 1.0 % of their samples had a gradient in "
        "the 5 steps up to step 5. 90 % lay below the floor."
    )


def test_samples_count_not_steps(run: RunDirectory) -> None:
    """4 of 40 and 0 of 4 x 10: 5 %, where the mean of the steps is 2 %. One sample less is too few."""
    others = [row(s, 0.0, n=10) for s in range(1, 5)]
    assert warnings(run, [row(0, 4 / 40, n=40), *others]) == []
    assert len(warnings(run, [row(0, 3 / 40, n=40), *others])) == 1


def test_steps_without_peers_and_evaluations_do_not_count(run: RunDirectory) -> None:
    alone = [row(s, 0.0, n=0) for s in range(9)]
    evaluations = [{**row(s, 0.0), "kind": "evaluation"} for s in range(9)]
    none = [{"kind": "train", "step": s, "agent": "ant"} for s in range(9)]
    assert warnings(run, [*alone, *evaluations, *none, *[row(s, 0.0) for s in range(4)]]) == []


def test_it_may_begin_later_and_the_floor_need_not_be_the_reason(run: RunDirectory) -> None:
    rows = [row(s, 0.5) for s in range(5)] + [row(s, 0.0, below=0.1) for s in range(5, 20)]
    (sentence,) = warnings(run, rows)
    assert "up to step 10." in sentence and "floor" not in sentence


def test_a_resumed_run_does_not_repeat_it(run: RunDirectory) -> None:
    rows = [row(s, 0.0) for s in range(6)]
    run.add_metrics(rows)
    assert warnings(run, [row(6, 0.0)]) == []
    run.rewind(3)  # back before the warning
    assert len(warnings(run, [row(3, 0.0), row(4, 0.0)])) == 1
