"""Cells that run out of memory: which of them are run again, and how many side by side. The cells are
processes that sleep and end with a code."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import tomli_w

from hacrl.study.compare import run
from hacrl.study.compare.run import _Running, run_cells
from hacrl.study.compare.suite import Cell, make_cells, read_suite

FULL = 4
"""The exit code of a run without memory."""
KILLED = -9
"""What a process that was killed ends with."""
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
"""In place of a process: another `compare` has the cell."""

Ends = list[tuple[float, int] | None]
"""How a cell's processes end, one after the other: after so many seconds, with this code."""


class Cells:
    """Cells by seed, and what became of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *ends: Ends) -> None:
        path = folder / "suite.toml"
        path.write_text(tomli_w.dumps(SUITE | {"seeds": list(range(1, len(ends) + 1))}))
        self.cells = make_cells(read_suite(path), folder / "out")
        self.ends = {cell.name: list(e) for cell, e in zip(self.cells, ends, strict=True)}
        self.began: list[int] = []
        """Seeds, in the order in which their processes began."""
        self.done: dict[str, bool] = defaultdict(bool)
        monkeypatch.setattr(run, "_start", self.start)
        monkeypatch.setattr(run, "LOOK_EVERY", 0.02)
        monkeypatch.setattr(Cell, "finished", property(lambda cell: self.done[cell.name]))

    def start(self, cell: Cell, parallel: int) -> _Running | None:
        end = self.ends[cell.name].pop(0)
        if end is None:
            return None
        self.began.append(cell.config.seed)
        seconds, code = end
        end = f"os.kill(os.getpid(), {-code})" if code < 0 else f"sys.exit({code})"
        script = f"import os, sys, time; time.sleep({seconds}); {end}"
        self.done[cell.name] = code == 0  # asked for after the process has ended
        process = subprocess.Popen([sys.executable, "-c", script])
        return _Running(cell, process)

    def run(self, parallel: int) -> list[str]:
        """Names of the cells that failed."""
        return [name.rpartition("-")[2] for name, *_ in run_cells(self.cells, parallel)]


def test_fewer_go_on_and_the_one_that_failed_comes_first(tmp_path, monkeypatch, capfd) -> None:
    """Of three side by side one has no room. It goes on before the fourth, two at a time."""
    cells = Cells(
        tmp_path, monkeypatch, [(2.0, 0)], [(2.2, 0)], [(0.2, FULL), (0.1, 0)], [(0.1, 0)]
    )
    assert cells.run(3) == []
    assert cells.began == [1, 2, 3, 3, 4]
    said = capfd.readouterr().err
    assert said.count("at most 2 side by side") == 1 and said.count("out of memory: ") == 1
    assert "one cell at a time" not in said


def test_one_that_leaves_after_the_others_had_company(tmp_path, monkeypatch) -> None:
    cells = Cells(tmp_path, monkeypatch, [(0.2, 0)], [(1.0, FULL), (0.1, 0)])
    assert cells.run(2) == [] and cells.began == [1, 2, 2]


def test_all_at_once(tmp_path, monkeypatch, capfd) -> None:
    cells = Cells(tmp_path, monkeypatch, *([(0.5, FULL), (0.1, 0)] for _ in range(3)))
    assert cells.run(3) == [] and sorted(cells.began) == [1, 1, 2, 2, 3, 3]
    assert "one cell at a time" in capfd.readouterr().err


def test_alone_it_fails(tmp_path, monkeypatch) -> None:
    cells = Cells(tmp_path, monkeypatch, [(0.1, FULL)], [(0.1, 0)])
    assert cells.run(1) == ["1"] and cells.began == [1, 2]


def test_another_compare_counts_as_company(tmp_path, monkeypatch) -> None:
    """A cell that a killed one left running is waited for, and may be what took the memory."""
    cells = Cells(tmp_path, monkeypatch, [HELD] * 30 + [(0.1, 0)], [(0.2, FULL), (0.1, 0)])
    assert cells.run(2) == [] and cells.began.count(2) == 2


def test_one_that_the_system_kills_goes_on_as_well(tmp_path, monkeypatch, capfd) -> None:
    """A machine short of memory kills; beside others the cell is tried again, alone it has failed."""
    cells = Cells(tmp_path, monkeypatch, [(0.5, 0)], [(0.1, KILLED), (0.1, 0)])
    assert cells.run(2) == [] and cells.began == [1, 2, 2]
    assert "killed: team/gspo/seed-2. It goes on when there is room" in capfd.readouterr().err
    cells = Cells(tmp_path, monkeypatch, [(0.1, KILLED)])
    assert cells.run(1) == ["1"]
    assert "killed, by the system if memory ran short" in capfd.readouterr().err


def test_another_failure_is_final(tmp_path, monkeypatch) -> None:
    cells = Cells(tmp_path, monkeypatch, [(0.5, 0)], [(0.1, 2)])
    assert cells.run(2) == ["2"] and cells.began == [1, 2]
