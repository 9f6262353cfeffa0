"""Runs of one team in several runtimes, on the CPU (tests/engines) and on a GPU (tests/gpu)."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from process_table import family
from team import member, team

from hacrl.store.checkpoint import Checkpoints
from hacrl.store.rundir import RunDirectory

CONFIG = team(member("wren", gpus=0.5), member("finch", gpus=0.5))
"""With Ray both agents use one GPU; other runtimes do not read `gpus`."""


def in_runtime(config: dict[str, Any], kind: str, **runtime: Any) -> dict[str, Any]:
    return {**config, "runtime": {**config["runtime"], "kind": kind, **runtime}}


def assert_same_run(run: RunDirectory, in_turn: RunDirectory, device: str = "cpu") -> None:
    """Metrics and weights of the run are those of the run in one process: on the CPU bit for bit, on
    a GPU up to rounding."""
    if device == "cpu":
        assert run.metrics_path.read_bytes() == in_turn.metrics_path.read_bytes()
    for row, other in zip(run.metric_rows(), in_turn.metric_rows(), strict=True):
        assert row.keys() == other.keys()
        for key, value in other.items():
            close = pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value
            assert row[key] == close, (row["kind"], row["step"], row["agent"], key)
    for name in ("wren", "finch"):
        mine, theirs = (Checkpoints(r.checkpoints(name), 2).load(3).model for r in (run, in_turn))
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            limit = 0.0 if device == "cpu" else 1e-4
            assert torch.allclose(mine[key], tensor, rtol=0, atol=limit), key


def kill_agents(
    patch: pytest.MonkeyPatch, executor: type, find: Callable[[Any], Iterable[int]]
) -> set[int]:
    """All processes that `find` returns are killed when finch begins to learn in the second step. They
    join the set that is returned."""
    killed: set[int] = set()
    real = executor.call  # type: ignore[attr-defined]

    async def call(self: Any, name: str, method: str, *args: Any) -> Any:
        calling = asyncio.ensure_future(real(self, name, method, *args))
        await asyncio.sleep(0)
        if not killed and (name, method, args) == ("finch", "learn", (1,)):
            killed.update(find(self))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return await calling

    patch.setattr(executor, "call", call)
    return killed


def process_ids(executor: Any) -> list[int]:
    """Of the agents of a ProcessExecutor."""
    return [p.process.pid for p in executor.processes.values()]


def actors(kind: str = "AgentActor") -> set[int]:
    """Processes of actors of this kind that this test's Ray has started."""
    mine = family(os.getpid()).items()
    return {pid for pid, (_, command) in mine if command.startswith(f"ray::{kind}")}
