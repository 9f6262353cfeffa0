"""Kill -9 at any moment, resume, and have the run that an unbroken one would have been."""

from pathlib import Path

import pytest
from killed import run_until_killed
from team import member, snapshots, team

import hacrl
from hacrl.store.rundir import RunDirectory

MOMENTS = [
    "sampling",
    "before publishing",
    "between updates",
    "writing a checkpoint",
    "evaluating",
    "writing metrics",
]
CONFIG = team(member("wren"), member("finch"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return hacrl.train(CONFIG, tmp_path_factory.mktemp("unbroken") / "run")


def weights(run: RunDirectory) -> dict[str, bytes]:
    paths = run.path.glob("checkpoints/*/step-000003/model.safetensors")
    return {path.parts[-3]: path.read_bytes() for path in paths}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_unbroken(
    moment: str, unbroken: RunDirectory, tmp_path: Path
) -> None:
    run_until_killed(CONFIG, tmp_path / "run", moment)
    broken = RunDirectory.open(tmp_path / "run")
    assert broken.metric_rows() != unbroken.metric_rows()

    run = hacrl.resume(tmp_path / "run")

    assert run.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()
    assert snapshots(run, 3) == snapshots(unbroken, 3)
    assert weights(run) == weights(unbroken) and len(weights(run)) == 2
    leftovers = [p for p in run.path.rglob("*") if ".tmp" in p.name]
    assert leftovers == []


def test_killed_in_half_precision(tmp_path: Path) -> None:
    """A step that is learned again from the journal has its own ratios corrected for rounding, as in the
    run that was not killed."""
    config = team(member("wren", dtype="bfloat16"), member("finch"))
    whole = hacrl.train(config, tmp_path / "whole")
    assert "agreement/rounding" in whole.metric_rows("train")[0]
    run_until_killed(config, tmp_path / "run", "between updates")
    run = hacrl.resume(tmp_path / "run")
    assert run.metrics_path.read_bytes() == whole.metrics_path.read_bytes()
    assert weights(run) == weights(whole) and len(weights(run)) == 2


def test_the_same_seed_is_the_same_run_and_another_is_not(
    unbroken: RunDirectory, tmp_path: Path
) -> None:
    again = hacrl.train(CONFIG, tmp_path / "again")
    assert again.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()
    other = hacrl.train(CONFIG, tmp_path / "other", seed=4)
    assert other.metric_rows() != unbroken.metric_rows()


def test_a_finished_run_can_be_made_longer(unbroken: RunDirectory, tmp_path: Path) -> None:
    """2 steps, then resumed to 3: the training rows are those of 3 at once."""
    hacrl.train(CONFIG, tmp_path / "run", steps=2)
    run = hacrl.resume(tmp_path / "run", steps=3)
    assert run.metric_rows("train") == unbroken.metric_rows("train")
