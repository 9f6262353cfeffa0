"""Checks of the theory on a GPU: bfloat16 weights with a float32 master."""

from math import isfinite
from pathlib import Path

import pytest
from team import member, team

import hacrl


@pytest.mark.gpu
def test_a_check_on_the_gpu_is_complete_and_changes_no_update(tmp_path: Path) -> None:
    """The first step's updates are those of a run without the check; the gradient of the check has
    the norm that the update reports."""
    rows = []
    for every in (0, 1):
        config = team(
            member("wren"),
            member("finch"),
            steps=1,
            minibatch_samples=24,
            runtime={"device": "cuda"},
            evaluation={"problems": 0},
            checkpoint={"save": False},
            diagnostics={"every": every, "problems": 4, "samples": 8},
        )
        run = hacrl.train(config, tmp_path / str(every))
        rows.append(next(r for r in run.metric_rows() if r["agent"] == "wren"))
    plain, checked = rows
    assert checked["own/grad_norm"] == pytest.approx(plain["own/grad_norm"], rel=1e-2)
    norm = checked["diagnostics/gradient_norm/wren"]
    assert norm == pytest.approx(checked["own/grad_norm"], rel=2e-2)
    for figure in ("gain/wren", "gain/finch", "cosine/finch", "update_norm/finch", "bias/own"):
        assert isfinite(checked[f"diagnostics/{figure}"]), figure
