"""Own ratios of a run's first updates, on a machine that rounds by shape."""

import shutil
from pathlib import Path

import pytest
from rounding import RoundsByShape
from team import member, team

import hacrl
from hacrl.store.rundir import RunDirectory


def own_ratios(run: RunDirectory, step: int, update: int) -> list[float]:
    rows = run.sample_rows(step, "wren")
    found = [r["ratio"] for r in rows if r["update"] == update and r["source"] == "wren"]
    return [ratio for ratio in found if ratio is not None]


def test_a_bfloat16_run_begins_every_step_at_ratio_1(tmp_path: Path) -> None:
    """Micro-batches of a few rows of unequal length, groups without advantage left out. The step's
    second update has other weights, so that its ratios are not 1. A step learned again from the journal
    has the ratios of the first time."""
    config = team(
        member("wren", dtype="bfloat16", microbatch_tokens=150),
        steps=2,
        prompts_per_step=12,
        minibatch_samples=24,
        sampler={"tolerance": 10.0},
        evaluation={"problems": 0},
        checkpoint={"every": 0},
    )
    with RoundsByShape():
        run = hacrl.train(config, tmp_path / "run")
        for step in (0, 1):
            first, second = (own_ratios(run, step, update) for update in (0, 1))
            assert 0 < len(first) < 24
            assert first == pytest.approx([1.0] * len(first), abs=1e-6)
            assert second != pytest.approx([1.0] * len(second), abs=1e-4)
        before = [own_ratios(run, step, update) for step in (0, 1) for update in (0, 1)]
        shutil.rmtree(run.path / "checkpoints")
        hacrl.resume(run.path)
    after = [own_ratios(run, step, update) for step in (0, 1) for update in (0, 1)]
    assert after == before
