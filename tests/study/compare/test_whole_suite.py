"""A tiny suite through the command: killed, gone on with, finished, and run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
import torch

from hacrl.errors import UserError
from hacrl.study.compare import compare
from hacrl.study.compare.results import collect
from hacrl.study.compare.run import _start
from hacrl.study.compare.suite import Cell, make_cells, read_suite

BASE = {
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "minibatch_samples": 8,
    "max_prompt_tokens": 64,
    "max_response_tokens": 16,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number", "workers": 0},
    "algorithm": {"name": "hacpo", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
    "evaluation": {"every": 1, "problems": 10},
    "checkpoint": {"save": False},
    "runtime": {"threads": 1, "device": "cpu"},
    "log": {"tensorboard": False, "samples": False},
    "agents": [{"name": "wren", "model": "pocket:wren", "learning_rate": 2e-4}],
}
SUITE = {
    "base": BASE,
    "seeds": [1, 2],
    "parallel": 2,
    "reference": "gspo",
    "arms": [{"name": "hacpo"}, {"name": "gspo", "overrides": ["algorithm.name=gspo"]}],
}


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of the cells with its time and bytes."""
    files = (p for p in sorted(folder.glob("cells/**/*")) if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite, killed (-9, with its children) as soon as a cell has sampled, then completed."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tiny.toml").write_text(tomli_w.dumps(SUITE))
    command = [sys.executable, "-m", "hacrl", "compare", folder / "tiny.toml"]
    process = subprocess.Popen(
        [*command, "--out", folder / "out", "--parallel", "1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + 300
    while not list(folder.glob("out/cells/*/*/*/journal/wren/step-*")):
        assert process.poll() is None and time.monotonic() < until, "never sampled"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate()
    assert b"begins: team/hacpo/seed-1" in err
    assert not (folder / "out" / "report.md").exists()
    begun = {p.parents[2] for p in folder.glob("out/cells/*/*/*/journal/wren/step-*")}
    journals = {p: p.stat().st_mtime_ns for b in begun for p in b.glob("journal/wren/step-*")}

    text = compare(folder / "tiny.toml", folder / "out")

    assert "wren (team), against gspo: hacpo (+0.0 [+0.0, +0.0], 2 seeds) is open" in text
    assert journals  # written once: gone on with, not begun again
    assert all(path.stat().st_mtime_ns == written for path, written in journals.items())
    return folder


def test_the_report_says_what_the_cells_say(finished: Path) -> None:
    """Alone, hacpo is gspo: paired runs of one seed are equal to the last digit."""
    out = finished / "out"
    runs = [out / "cells" / "team" / arm / "seed-2" for arm in ("hacpo", "gspo")]
    ours, theirs = ((run / "metrics.jsonl").read_bytes() for run in runs)
    assert ours == theirs
    found = json.loads((out / "results.json").read_text())
    assert found["budget"] == "rollouts" and found["comparisons"] == 1 and found["start_gap"] == 0
    [hacpo, gspo] = found["rows"]
    assert (hacpo["rollouts"], hacpo["updates"], hacpo["verdict"]) == (32, 4, "open")
    for row in (hacpo, gspo):
        rewards: list[float] = []
        for file in row["files"]:
            lines = (out / file / "replies.jsonl").read_text().splitlines()
            rewards += [json.loads(line)["reward"] for line in lines]
        assert row["after"]["mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert [band["rollouts"] for band in row["curve"]] == [0, 16, 32]


def test_the_report_is_one_file_without_a_network(finished: Path) -> None:
    html = (finished / "out" / "report.html").read_text()
    text = (finished / "out" / "report.md").read_text()
    for sign in ("://", "<script", "<link", "@import", "url("):
        assert sign not in html
    assert html.count("<svg") == 1 and html.count('class="curve"') == 2
    for page in (html, text):
        assert "is open: the interval contains zero" in page
        assert "Budget rule: rollouts" in page
        assert "cells/team/gspo/seed-1/evaluation/step-000002/wren" in page
        assert "all 1 comparisons" in page
        assert f"torch {torch.__version__}" in page


def test_finished_cells_are_never_run_again(finished: Path) -> None:
    out = finished / "out"
    before, report = content(out), (out / "report.md").read_bytes()
    compare(finished / "tiny.toml", out)
    assert content(out) == before
    assert (out / "report.md").read_bytes() == report


def test_a_report_of_what_is_there_runs_nothing(finished: Path, tmp_path: Path) -> None:
    """Of a suite with a third seed, which has no cell: two of three, and the same figures."""
    suite, out = tmp_path / "tiny.toml", tmp_path / "out"
    suite.write_text(tomli_w.dumps(SUITE | {"seeds": [1, 2, 3]}))
    with pytest.raises(UserError, match=r"no cell is finished, so there is nothing to compare\.$"):
        compare(suite, out, report_only=True)
    assert not out.exists()  # a mistyped folder is not made
    shutil.copytree(finished / "out", out)
    before = content(out)
    done = subprocess.run(
        [sys.executable, "-m", "hacrl", "compare", suite, "--out", out, "--report"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "hacpo (+0.0 [+0.0, +0.0], 2 seeds)" in done.stdout and "begins" not in done.stderr
    assert content(out) == before


def test_stopped_it_tells_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(SUITE))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hacrl",
            "compare",
            tmp_path / "tiny.toml",
            "--out",
            tmp_path / "out",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "begins" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "0 of 4 cells are finished. The same command goes on\n" in err  # nothing to judge yet


def test_another_reference_has_a_report_of_its_own(finished: Path) -> None:
    """gspo minus hacpo is what hacpo minus gspo is, turned; the suite's own report stays."""
    out, place = finished / "out", finished / "out" / "against" / "hacpo"
    before, report = content(out), (out / "report.md").read_bytes()
    said = compare(finished / "tiny.toml", out, against="hacpo")
    assert said.startswith("wren (team), against hacpo: gspo (")
    assert content(out) == before and (out / "report.md").read_bytes() == report
    own, other = (json.loads((p / "results.json").read_text()) for p in (out, place))
    assert (own["reference"], other["reference"]) == ("gspo", "hacpo")
    (one,), (two,) = ([r["difference"] for r in f["rows"] if r["difference"]] for f in (own, other))
    assert one["seeds"]["mean"] == pytest.approx(-two["seeds"]["mean"])
    assert one["p"] == pytest.approx(two["p"])
    text = (place / "report.md").read_text()
    assert "The suite's own reference is gspo" in text and "--against hacpo" in text
    assert "own reference is" not in (out / "report.md").read_text()
    command = [sys.executable, "-m", "hacrl", "compare", finished / "tiny.toml", "--out", out]
    done = subprocess.run([*command, "--against", "hacpo"], capture_output=True, text=True)
    assert done.returncode == 0 and f"report: {place / 'report.html'}" in done.stdout
    done = subprocess.run([*command, "--against", "grpo"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--against grpo: there is no such arm; there are hacpo, gspo" in done.stderr


def test_other_settings_are_not_mixed_in(finished: Path) -> None:
    before = content(finished / "out")
    with pytest.raises(UserError, match=r"holds a run of other settings: temperature is 1\.0"):
        compare(finished / "tiny.toml", finished / "out", ["temperature=0.5"])
    with pytest.raises(UserError, match="there is no such arm; there are hacpo, gspo"):
        compare(finished / "tiny.toml", finished / "out", only=["grpo"])
    assert content(finished / "out") == before


def test_equal_time_reads_the_evaluation_within_it(finished: Path, tmp_path: Path) -> None:
    """gspo takes 1 s a step, so it is read after 2 s. hacpo takes 1.5 s a step: after 2 s only its
    evaluation of step 1 is there. One second of evaluation counts for nobody."""
    shutil.copytree(finished / "out", tmp_path / "out")
    for arm, seconds in (("gspo", 1.0), ("hacpo", 1.5)):
        for seed in (1, 2):
            rows = [
                {"step": step, "agent": agent, "phase": spent}
                for step in (0, 1)
                for agent, spent in (("wren", seconds), ("", 1.0))
            ]
            path = tmp_path / "out" / "cells" / "team" / arm / f"seed-{seed}" / "times.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(SUITE | {"budget": "time"}))
    loaded = read_suite(tmp_path / "tiny.toml")
    rows = collect(loaded, make_cells(loaded, tmp_path / "out")).rows
    assert {r.arm: (r.rollouts, r.seconds) for r in rows} == {
        "hacpo": (16, 1.5),
        "gspo": (32, 2.0),
    }
    assert all("step-000001" in file for r in rows if r.arm == "hacpo" for file in r.files)


def cell(folder: Path, *overrides: str) -> Cell:
    arms = [{"name": "gspo", "overrides": ["algorithm.name=gspo", *overrides]}]
    path = folder / "one.toml"
    path.write_text(tomli_w.dumps(SUITE | {"seeds": [1], "arms": arms}))
    return make_cells(read_suite(path), folder / "out")[0]


def test_a_cell_that_another_process_holds_is_left_alone(tmp_path: Path) -> None:
    """As after a kill of `compare` alone: its children live on, and hold their locks."""
    import fcntl

    one = cell(tmp_path)
    one.folder.parent.mkdir(parents=True)
    with open(one.folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert _start(one, 1) is None
    assert not one.folder.exists() and not one.folder.with_suffix(".log").exists()


def test_a_cell_that_fails_is_told(tmp_path: Path) -> None:
    """The model's folder is not there: found by the child, told with its last line."""
    one = cell(tmp_path, f"agents.0.model={tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match=r"nothing to compare. team/gspo/seed-1: .*nowhere") as told:
        compare(tmp_path / "one.toml", tmp_path / "out")
    assert f"all of it: {one.folder}.log" in str(told.value)
    assert not one.finished


HUNGRY = """
import fcntl, time
from pathlib import Path
import torch
from hacrl.algorithms.gspo import Gspo

class Hungry(Gspo):
    def loss(self, batch, update):
        refused = Path({place!r} + ".refused")
        self.memory = open({place!r}, "w")
        try:
            fcntl.flock(self.memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        until = time.monotonic() + 60
        while not refused.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return super().loss(batch, update)
"""


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch) -> Path:
    """A suite of two cells that need all of a memory for their one update, side by side."""
    (tmp_path / "hungry.py").write_text(HUNGRY.format(place=str(tmp_path / "memory")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    short = ["steps=1", "minibatch_samples=16", "evaluation.problems=2"]
    arms = [{"name": "gspo", "overrides": ["algorithm.name=hungry:Hungry", *short]}]
    path = tmp_path / "one.toml"
    path.write_text(tomli_w.dumps(SUITE | {"arms": arms}))
    return path


def test_cells_that_run_out_of_memory_go_on_one_at_a_time(hungry: Path, capfd) -> None:
    compare(hungry, hungry.parent / "out")
    said = capfd.readouterr().err
    assert said.count("It goes on when there is room; from now on one cell at a time") == 1
    assert "failed" not in said and "2 of 2 cells" in said


def test_a_cell_that_has_too_little_memory_alone_fails(hungry: Path, capfd) -> None:
    import fcntl

    with open(hungry.parent / "memory", "w") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"nothing to compare. team/gspo/seed-\d: .*out of mem"):
            compare(hungry, hungry.parent / "out")
    said = capfd.readouterr().err
    assert "from now on one cell at a time" in said and said.count("failed: ") == 2
