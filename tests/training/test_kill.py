"""Kill -9 at any moment, resume, and have the run that an unbroken one would have been."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from team import member, team

import hacrl
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory

HERE = Path(__file__).parent
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


def pool_rows(run: RunDirectory) -> list:
    pool = Pool(run.pool_path, read_only=True)
    return [pool.snapshot(step) for step in range(3)]


def weights(run: RunDirectory, agent: str) -> dict[str, torch.Tensor]:
    from hacrl.store.checkpoint import Checkpoints

    return Checkpoints(run.checkpoints(agent), 2).load(3).model


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_unbroken(
    moment: str, unbroken: RunDirectory, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    killed = subprocess.run(
        [sys.executable, HERE / "killed.py", config, tmp_path / "run", moment],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    broken = RunDirectory.open(tmp_path / "run")
    assert broken.metrics() != unbroken.metrics()

    run = hacrl.resume(tmp_path / "run")

    assert run.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()
    assert pool_rows(run) == pool_rows(unbroken)
    for agent in ("wren", "finch"):
        mine, theirs = weights(run, agent), weights(unbroken, agent)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    leftovers = [p for p in run.path.rglob("*") if ".tmp" in p.name]
    assert leftovers == []


def test_the_same_seed_is_the_same_run_and_another_is_not(
    unbroken: RunDirectory, tmp_path: Path
) -> None:
    again = hacrl.train(CONFIG, tmp_path / "again")
    assert again.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()
    other = hacrl.train(CONFIG, tmp_path / "other", seed=4)
    assert other.metrics() != unbroken.metrics()


def test_a_finished_run_can_be_made_longer(unbroken: RunDirectory, tmp_path: Path) -> None:
    """2 steps, then resumed to 3: the training rows are those of 3 at once."""
    hacrl.train(CONFIG, tmp_path / "run", steps=2)
    run = hacrl.resume(tmp_path / "run", steps=3)

    def trained(r: RunDirectory) -> list:
        return [row for row in r.metrics() if row["kind"] == "train"]

    assert trained(run) == trained(unbroken)
