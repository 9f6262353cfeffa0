"""A tiny suite through the command: killed, continued, finished, and started again."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from process_table import wait_until
from tiny_suite import SMALL, SUITE, command, write_suite

from hacrl.config import load_config
from hacrl.errors import UserError
from hacrl.pocket import POCKET_CONFIG
from hacrl.store.rundir import RunDirectory
from hacrl.study.compare import compare
from hacrl.study.compare.report import verdicts
from hacrl.study.compare.runner import SuiteProgress, _start
from hacrl.study.compare.suite import Run, load_suite, make_runs


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and bytes of every file of the runs."""
    files = (p for p in sorted(folder.glob("runs/**/*")) if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite, killed with its children as soon as a run has sampled, then completed."""
    folder = tmp_path_factory.mktemp("suite")
    write_suite(folder)
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command(folder, "--parallel", "1"), **pipes, start_new_session=True)
    sampled = "out/runs/*/*/*/journal/wren/step-*"
    wait_until(lambda: process.poll() is not None or list(folder.glob(sampled)), 300, every=0.01)
    os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate()
    assert b"started: team/hacpo/seed-1" in err
    assert not (folder / "out" / "report.md").exists()
    journals = {p: p.stat().st_mtime_ns for p in folder.glob(sampled)}

    [sentence] = verdicts(compare(folder / "tiny.toml", folder / "out"))

    assert "wren (team) against gspo: open: hacpo +0.0" in sentence
    assert journals  # written once: the run was continued, not started again
    assert all(path.stat().st_mtime_ns == written for path, written in journals.items())
    return folder


def test_the_report_agrees_with_the_runs(finished: Path) -> None:
    """With one agent hacpo is gspo: the runs of one seed are equal to the last digit."""
    out = finished / "out"
    runs = [out / "runs" / "team" / arm / "seed-2" for arm in ("hacpo", "gspo")]
    ours, theirs = ((run / "metrics.jsonl").read_bytes() for run in runs)
    assert ours == theirs
    found = json.loads((out / "results.json").read_text())
    assert found["comparisons"] == 1
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
    for sign in ("<script src", '<link rel="stylesheet"', "@import", "url(", "<img", "connect-src"):
        assert sign not in html
    assert "default-src 'none'" in html  # the policy allows no request
    start = html.index('id="data">') + len('id="data">')
    found = json.loads(html[start : html.index("</script>", start)])["answers"]["suite"]
    assert found["base"] == ""  # the folder of the runs, from the report
    assert found["results"] == json.loads((finished / "out" / "results.json").read_text())
    assert "[seed 1](runs/team/gspo/seed-1)" in text
    for page in (found["report"], text):
        assert "An arm is one way of training" in page and "A run is one training run" in page
        assert "wren (team) against gspo: open: hacpo" in page
        assert f"torch {torch.__version__}" in page


def test_finished_runs_are_never_trained_again(finished: Path, tmp_path: Path) -> None:
    """The same command again, and --report of a suite with a third seed that has no run."""
    out = finished / "out"
    before, names = content(out), ("report.md", "report.html")
    reports = [(out / name).read_bytes() for name in names]
    compare(finished / "tiny.toml", out)
    assert content(out) == before and [(out / name).read_bytes() for name in names] == reports
    suite, copy = write_suite(tmp_path, seeds=[1, 2, 3]), tmp_path / "out"
    with pytest.raises(UserError, match=r"no run is finished, so there is no report\.$"):
        compare(suite, copy, report_only=True)
    assert not copy.exists()  # a mistyped folder is not created
    shutil.copytree(out, copy)
    before = content(copy)
    done = subprocess.run(command(tmp_path, "--report"), capture_output=True, text=True, check=True)
    assert "+0.0 [+0.0, +0.0]" in done.stdout and "started" not in done.stderr
    assert content(copy) == before
    assert f"show {copy / 'runs' / 'team' / 'hacpo' / 'seed-1'}\n" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_suite_says_how_to_continue(tmp_path: Path, number: int, code: int) -> None:
    write_suite(tmp_path)
    process = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True)
    while "started" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "0 of 4 runs are finished. The same command continues\n" in err  # no report yet


def test_another_reference_has_its_own_report(finished: Path) -> None:
    """gspo minus hacpo is the negative of hacpo minus gspo; the suite's report stays."""
    out, place = finished / "out", finished / "out" / "against" / "hacpo"
    before, report = content(out), (out / "report.md").read_bytes()
    done = subprocess.run(command(finished, "--against", "hacpo"), capture_output=True, text=True)
    assert done.returncode == 0 and f"report: {place / 'report.html'}" in done.stdout
    assert content(out) == before and (out / "report.md").read_bytes() == report
    own, other = (json.loads((p / "results.json").read_text()) for p in (out, place))
    assert other["verdicts"][0].startswith("wren (team) against hacpo: open: gspo ")
    assert (own["reference"], other["reference"]) == ("gspo", "hacpo")
    (one,), (two,) = ([r["difference"] for r in f["rows"] if r["difference"]] for f in (own, other))
    assert one["seeds"]["mean"] == pytest.approx(-two["seeds"]["mean"])
    assert one["p"] == pytest.approx(two["p"])
    text = (place / "report.md").read_text()
    assert "The suite's reference is gspo" in text and "(../../runs/team/gspo/seed-1)" in text


def test_other_settings_and_wrong_names_are_refused(finished: Path) -> None:
    suite, out = finished / "tiny.toml", finished / "out"
    before = content(out)
    with pytest.raises(UserError, match=r"holds a run with other settings: temperature is 1\.0"):
        compare(suite, out, ["temperature=0.5"])
    with pytest.raises(UserError, match="--only grpo: no such arm; arms: hacpo, gspo"):
        compare(suite, out, only=["grpo"])
    with pytest.raises(UserError, match="--against grpo: no such arm; arms: hacpo, gspo"):
        compare(suite, out, against="grpo")
    with pytest.raises(UserError, match="--teams pair: no such team; teams: team"):
        compare(suite, out, teams=["pair"])
    assert content(out) == before


def one_run(folder: Path, *overrides: str) -> Run:
    arms = [{"name": "gspo", "overrides": ["algorithm.name=gspo", *overrides]}]
    return make_runs(load_suite(write_suite(folder, seeds=[1], arms=arms)), folder / "out")[0]


def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    """As after a kill of `compare` alone: its children live on and hold their locks."""
    run = one_run(tmp_path)
    run.folder.parent.mkdir(parents=True)
    with open(run.folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert _start(run, 1) is None
    assert not run.folder.exists() and not run.folder.with_suffix(".log").exists()


def test_a_failed_run_is_reported_with_its_last_line(tmp_path: Path) -> None:
    run = one_run(tmp_path, f"agents.0.model={tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match=r"no report. team/gspo/seed-1: .*nowhere") as error:
        compare(tmp_path / "tiny.toml", tmp_path / "out")
    assert f"log: {run.folder}.log" in str(error.value)
    assert not run.finished


def test_runs_that_fail_alike_are_reported_together(tmp_path: Path) -> None:
    """Two arms with two seeds fail, for a reason each: two sentences."""
    arms = [
        {"name": "hacpo", "overrides": [f"agents.0.model={tmp_path / 'nowhere'}"]},
        {"name": "gspo", "overrides": [f"agents.0.model={tmp_path / 'elsewhere'}"]},
    ]
    suite = write_suite(tmp_path, arms=arms)
    with pytest.raises(UserError, match="no report") as error:
        compare(suite, tmp_path / "out")
    text = str(error.value)
    assert text.count("team/hacpo/seed-1, team/hacpo/seed-2: ") == 1
    assert text.count("team/gspo/seed-1, team/gspo/seed-2: ") == 1
    assert text.count("(log: ") == 2


def test_dynamic_sampling_is_read_within_the_rollouts_of_the_reference(tmp_path: Path) -> None:
    """gspo draws 4 x 4 x 4 = 64 rollouts in 4 steps. The other arm draws more in as many steps, and
    counts up to its last evaluation within 64."""
    arms = [SUITE["arms"][1], {"name": "d", "overrides": ["algorithm.name=gspo-dynamic"]}]
    suite = write_suite(tmp_path, arms=arms, seeds=[1], overrides=[*SMALL.split(), "steps=4"])
    kept = tmp_path / "kept.jsonl"
    gspo, dynamic = compare(suite, tmp_path / "out", kept=kept).rows
    assert [*compare(suite, tmp_path / "other", report_only=True, kept=kept).rows][1].curve == (
        dynamic.curve
    )
    run = make_runs(load_suite(suite), tmp_path / "out")[1]
    drawn = [row["rollouts"] for row in run.reader.metric_rows("train", "wren")]
    sums = [sum(drawn[:n]) for n in range(5)]
    within = [n for n in sums if n <= 64]
    assert gspo.rollouts == 64 < sums[-1]
    assert dynamic.rollouts == within[-1]
    assert [band.rollouts for band in dynamic.curve] == within


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
