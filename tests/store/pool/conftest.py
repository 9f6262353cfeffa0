"""Rows for the pool's tests, and real processes to write them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hacrl.store.pool
from hacrl.store.pool import Pool, open_pool
from hacrl.types import Finish, Sampling, Status, Trajectory, Turn, Verdict

SRC = Path(hacrl.store.pool.__file__).parents[3]


def make_row(
    agent: str = "ant", problem: str = "q1", index: int = 0, step: int = 3, text: str = "42"
) -> Trajectory:
    return Trajectory(
        problem_id=problem,
        task="add",
        agent=agent,
        index=index,
        step=step,
        policy_version=step,
        turns=(Turn("assistant", text, True),),
        finish=Finish.STOP,
        mean_logprob=-0.1,
        num_tokens=3,
        verdict=Verdict(1.0, Status.OK, "42"),
        verifier="number/1",
        sampling=Sampling(1.0, 32),
        shareable=True,
    )


@pytest.fixture
def row() -> Callable[..., Trajectory]:
    return make_row


@pytest.fixture(params=["memory://", "sqlite:///sub/pool.db"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    pool = open_pool(request.param, tmp_path)
    yield pool
    pool.dispose()


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start a Python script in a process of its own."""

    def run(script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run
