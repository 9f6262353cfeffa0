"""Runs without memory: which are retried, and how many train at a time. The training processes are
replaced by ones that sleep and exit with a code. Notes of the runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.config import load_config
from hacrl.pocket import POCKET_CONFIG
from hacrl.store.rundir import RunDirectory
from hacrl.study.compare import runner
from hacrl.study.compare.runner import Process, SuiteProgress, train_runs
from hacrl.study.compare.suite import Run

OK, FULL, KILLED = (0.1, 0), (0.1, 4), (0.1, -9)
"""(seconds, exit code) of a process: it finishes, has no memory, is killed."""
HELD = None
"""Instead of a process: another `compare` trains the run."""

Ends = list[tuple[float, int] | None]
"""How the processes of one run end, in order."""


class FakeRuns:
    """Runs with the seeds 1, 2, ..., whose processes end as given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Ends) -> None:
        self.ends = {seed: list(processes) for seed, processes in enumerate(ends, start=1)}
        self.started: list[int] = []
        self.done: set[int] = set()
        monkeypatch.setattr(runner, "_start", self.start)
        monkeypatch.setattr(runner, "POLL_EVERY", 0.02)
        monkeypatch.setattr(Run, "finished", property(lambda run: run.seed in self.done))

    def start(self, run: Run, parallel: int) -> Process | None:
        if (end := self.ends[run.seed].pop(0)) is None:
            return None
        self.started.append(run.seed)
        seconds, code = end
        if code == 0:
            self.done.add(run.seed)  # read after the process has ended
        action = f"os.kill(os.getpid(), {-code})" if code < 0 else f"sys.exit({code})"
        script = f"import os, sys, time; time.sleep({seconds}); {action}"
        return Process(run, subprocess.Popen([sys.executable, "-c", script]))

    def train(self, parallel: int) -> list[str]:
        """Names of the failed runs."""
        config = load_config(POCKET_CONFIG)
        runs = [Run("team", "gspo", n, Path(f"nowhere/seed-{n}"), config) for n in self.ends]
        return [name for name, *_ in train_runs(runs, parallel)]


def test_fewer_continue_and_the_failed_one_comes_first(monkeypatch, capfd) -> None:
    """One of three has no memory. It continues before the fourth, two at a time."""
    runs = FakeRuns(monkeypatch, [(2.0, 0)], [(2.2, 0)], [FULL, OK], [OK])
    assert runs.train(3) == [] and runs.started == [1, 2, 3, 3, 4]
    said = capfd.readouterr().err
    assert said.count("at most 2 runs at a time") == 1 and said.count("out of memory: ") == 1
    assert "one run at a time" not in said


def test_all_at_once(monkeypatch, capfd) -> None:
    runs = FakeRuns(monkeypatch, *([(0.5, 4), OK] for _ in range(3)))
    assert runs.train(3) == [] and sorted(runs.started) == [1, 1, 2, 2, 3, 3]
    assert "one run at a time" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ends", "parallel", "failed", "started"),
    [
        ([[OK], [(1.0, 4), OK]], 2, [], [1, 2, 2]),  # another run was beside it before
        ([[(0.5, 0)], [KILLED, OK]], 2, [], [1, 2, 2]),
        ([[FULL], [OK]], 1, ["team/gspo/seed-1"], [1, 2]),  # alone it has failed
        ([[KILLED]], 1, ["team/gspo/seed-1"], [1]),
        ([[(0.5, 0)], [(0.1, 2)]], 2, ["team/gspo/seed-2"], [1, 2]),  # another failure is final
        ([[HELD] * 30 + [OK], [FULL, OK]], 2, [], [1, 2, 2]),  # another `compare` takes memory
    ],
)
def test_which_runs_are_retried(
    monkeypatch, ends: list[Ends], parallel: int, failed: list[str], started: list[int], capfd
) -> None:
    runs = FakeRuns(monkeypatch, *ends)
    assert runs.train(parallel) == failed and sorted(runs.started) == started
    said = capfd.readouterr().err
    if KILLED in ends[-1]:
        expected = "killed (by the system" if failed else "killed: team/gspo/seed-2. It continues"
        assert expected in said


def test_notes_of_the_runs_are_shown_once_per_kind(tmp_path: Path, capfd) -> None:
    """Numbers do not make a new kind, names of agents do. A damaged file of notes stops nothing."""
    config = load_config(POCKET_CONFIG)
    runs = [Run("team", "gspo", n, tmp_path / str(n), config) for n in (1, 2, 3)]
    progress = SuiteProgress(runs, runs, 1)
    for run, agent in zip(runs, ("a-1b", "a-1b", "a-3b"), strict=True):
        run.folder.mkdir()
        RunDirectory(run.folder).add_note(1, f"agent '{agent}' left out {run.seed} of 4\nproblems")
        progress.finished(run)
    (runs[0].folder / "notes.jsonl").write_text("{}\n")
    progress.finished(runs[0])
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note")]
    assert notes == [
        "note of team/gspo/seed-1: agent 'a-1b' left out 1 of 4 problems",
        "note of team/gspo/seed-3: agent 'a-3b' left out 3 of 4 problems",
    ]
