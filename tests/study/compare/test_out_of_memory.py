"""Runs without memory: which are retried, and how many train at a time. The training processes are
replaced by ones that sleep and exit with a code."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import tomli_w

from hacrl.study.compare import runner
from hacrl.study.compare.runner import Process, train_runs
from hacrl.study.compare.suite import Run, load_suite, make_runs

FULL = 4
"""Exit code of a run without memory."""
KILLED = -9
"""Exit code of a killed process."""
SUITE = {
    "base": {
        "steps": 1,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
        "evaluation": {"every": 1},
        "agents": [{"name": "wren", "model": "pocket:wren"}],
    },
    "reference": "gspo",
    "arms": [{"name": "gspo", "overrides": ["algorithm.name=gspo"]}],
}
HELD = None
"""Instead of a process: another `compare` trains the run."""

Ends = list[tuple[float, int] | None]
"""How the processes of a run end, in order: (seconds, exit code)."""


class FakeRuns:
    """Runs by seed, with processes that end as given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *ends: Ends) -> None:
        path = folder / "suite.toml"
        path.write_text(tomli_w.dumps(SUITE | {"seeds": list(range(1, len(ends) + 1))}))
        self.runs = make_runs(load_suite(path), folder / "out")
        self.ends = {run.name: list(e) for run, e in zip(self.runs, ends, strict=True)}
        self.started: list[int] = []
        """Seeds, in the order in which their processes started."""
        self.done: dict[str, bool] = defaultdict(bool)
        monkeypatch.setattr(runner, "_start", self.start)
        monkeypatch.setattr(runner, "POLL_EVERY", 0.02)
        monkeypatch.setattr(Run, "finished", property(lambda run: self.done[run.name]))

    def start(self, run: Run, parallel: int) -> Process | None:
        end = self.ends[run.name].pop(0)
        if end is None:
            return None
        self.started.append(run.config.seed)
        seconds, code = end
        end = f"os.kill(os.getpid(), {-code})" if code < 0 else f"sys.exit({code})"
        script = f"import os, sys, time; time.sleep({seconds}); {end}"
        self.done[run.name] = code == 0  # read after the process has ended
        return Process(run, subprocess.Popen([sys.executable, "-c", script]))

    def train(self, parallel: int) -> list[str]:
        """Seeds of the failed runs."""
        return [name.rpartition("-")[2] for name, *_ in train_runs(self.runs, parallel)]


def test_fewer_go_on_and_the_one_that_failed_comes_first(tmp_path, monkeypatch, capfd) -> None:
    """One of three has no memory. It continues before the fourth, two at a time."""
    runs = FakeRuns(
        tmp_path, monkeypatch, [(2.0, 0)], [(2.2, 0)], [(0.2, FULL), (0.1, 0)], [(0.1, 0)]
    )
    assert runs.train(3) == []
    assert runs.started == [1, 2, 3, 3, 4]
    said = capfd.readouterr().err
    assert said.count("at most 2 runs at a time") == 1 and said.count("out of memory: ") == 1
    assert "one run at a time" not in said


def test_a_run_that_had_others_beside_it_earlier_is_retried(tmp_path, monkeypatch) -> None:
    runs = FakeRuns(tmp_path, monkeypatch, [(0.2, 0)], [(1.0, FULL), (0.1, 0)])
    assert runs.train(2) == [] and runs.started == [1, 2, 2]


def test_all_at_once(tmp_path, monkeypatch, capfd) -> None:
    runs = FakeRuns(tmp_path, monkeypatch, *([(0.5, FULL), (0.1, 0)] for _ in range(3)))
    assert runs.train(3) == [] and sorted(runs.started) == [1, 1, 2, 2, 3, 3]
    assert "one run at a time" in capfd.readouterr().err


def test_alone_it_fails(tmp_path, monkeypatch) -> None:
    runs = FakeRuns(tmp_path, monkeypatch, [(0.1, FULL)], [(0.1, 0)])
    assert runs.train(1) == ["1"] and runs.started == [1, 2]


def test_a_run_of_another_compare_counts(tmp_path, monkeypatch) -> None:
    """A run left by a killed `compare` may have taken the memory."""
    runs = FakeRuns(tmp_path, monkeypatch, [HELD] * 30 + [(0.1, 0)], [(0.2, FULL), (0.1, 0)])
    assert runs.train(2) == [] and runs.started.count(2) == 2


def test_a_killed_run_is_retried_as_well(tmp_path, monkeypatch, capfd) -> None:
    """Beside others a killed run is retried; alone it has failed."""
    runs = FakeRuns(tmp_path, monkeypatch, [(0.5, 0)], [(0.1, KILLED), (0.1, 0)])
    assert runs.train(2) == [] and runs.started == [1, 2, 2]
    assert "killed: team/gspo/seed-2. It continues later" in capfd.readouterr().err
    runs = FakeRuns(tmp_path, monkeypatch, [(0.1, KILLED)])
    assert runs.train(1) == ["1"]
    assert "killed (by the system if memory ran out)" in capfd.readouterr().err


def test_another_failure_is_final(tmp_path, monkeypatch) -> None:
    runs = FakeRuns(tmp_path, monkeypatch, [(0.5, 0)], [(0.1, 2)])
    assert runs.train(2) == ["2"] and runs.started == [1, 2]
