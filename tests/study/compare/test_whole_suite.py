"""A tiny suite through the command: killed, continued, finished, started again, and kept in a file."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from process_table import wait_until

from hacrl.config import load_config
from hacrl.errors import UserError
from hacrl.pocket import POCKET_CONFIG
from hacrl.store.rundir import RunDirectory
from hacrl.study.compare import compare
from hacrl.study.compare.benchmarks import evaluate_runs
from hacrl.study.compare.finished import FinishedRuns
from hacrl.study.compare.plan import make_plan
from hacrl.study.compare.reading import AgentRun, Point
from hacrl.study.compare.report import as_json, verdicts
from hacrl.study.compare.results import _alone_elsewhere
from hacrl.study.compare.runner import SuiteProgress, _start
from hacrl.study.compare.suite import Run, SuiteBenchmarks, load_suite, make_runs

SMALL = """steps=2 prompts_per_step=4 samples_per_prompt=4 minibatch_samples=8 max_response_tokens=16
evaluation.every=1 evaluation.problems=10 evaluation.samples=1 verifier.workers=0 checkpoint.save=false
log.tensorboard=false log.samples=false"""
SUITE = {
    "base": str(POCKET_CONFIG),
    "overrides": SMALL.split(),
    "seeds": [1, 2],
    "parallel": 2,
    "reference": "gspo",
    "arms": [{"name": "hacpo"}, {"name": "gspo", "overrides": ["algorithm.name=gspo"]}],
    "teams": [{"name": "team", "agents": ["wren"]}],
}


def command(folder: Path, *options: object) -> list[str]:
    suite, out = folder / "tiny.toml", folder / "out"
    parts = (sys.executable, "-m", "hacrl", "compare", suite, "--out", out, *options)
    return [str(part) for part in parts]


def write_suite(folder: Path, **changes: object) -> Path:
    (folder / "tiny.toml").write_text(tomli_w.dumps(SUITE | changes))
    return folder / "tiny.toml"


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


def test_no_command_is_shown_for_a_run_that_is_only_in_the_file(kept: Path, tmp_path: Path) -> None:
    write_suite(tmp_path, **ALONE)
    options = "--report", "--kept", kept
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, check=True)
    assert "report: " in done.stdout and " show " not in done.stdout
    text = (tmp_path / "out/report.md").read_text()
    assert f"tiny.toml --out {tmp_path / 'out'} --kept {kept}\n" in text


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


def test_other_settings_and_wrong_names_are_refused(finished: Path, tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- --kept FILE and --teams

ALONE = {"seeds": [1], "arms": SUITE["arms"][1:], "overrides": [*SMALL.split(), "steps=1"]}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the finished runs of seed 1; the run directories are gone."""
    folder = tmp_path_factory.mktemp("kept")
    compare(write_suite(folder, **ALONE), folder / "out", kept=folder / "runs.jsonl")
    (folder / "results.json").write_text((folder / "out" / "results.json").read_text())
    shutil.rmtree(folder / "out")
    return folder / "runs.jsonl"


def test_a_report_from_the_file_equals_that_of_the_runs(kept: Path, tmp_path: Path) -> None:
    before = json.loads((kept.parent / "results.json").read_text())
    lines = kept.read_bytes()
    changes = ["runtime.threads=1", "verifier.workers=1"]  # may differ between machines
    again = as_json(compare(write_suite(tmp_path, **ALONE), tmp_path / "out", changes, kept=kept))
    again = json.loads(json.dumps(again))
    for row in ("rows", "missing", "environment"):
        assert again[row] == before[row]
    assert kept.read_bytes() == lines and not list(tmp_path.glob("out/runs/*/*/*"))


def test_only_the_runs_that_are_not_in_the_file_are_trained(kept: Path, tmp_path: Path) -> None:
    both = shutil.copy(kept, tmp_path / "runs.jsonl")
    path = write_suite(tmp_path, **ALONE | {"seeds": [1, 2]})
    [row] = compare(path, tmp_path / "out", kept=both).rows
    assert row.seeds == (1, 2)
    assert [p.name for p in tmp_path.glob("out/runs/*/*/*/")] == ["seed-2"]
    problems, *runs = (json.loads(line) for line in both.read_text().splitlines())
    assert len(problems["problems"]) == 10
    assert [run["run"] for run in runs] == ["team/gspo/seed-1", "team/gspo/seed-2"]


def test_benchmarks_leave_out_a_run_that_is_only_in_the_file(kept: Path, tmp_path: Path) -> None:
    suite, said = load_suite(write_suite(tmp_path, **ALONE)), list[str]()
    runs = FinishedRuns(kept).with_results(make_runs(suite, tmp_path / "out"))
    evaluate_runs(SuiteBenchmarks(names="math500"), runs, said.append)
    assert said == [
        "benchmarks: team/gspo/seed-1 is left out: only its line in --kept FILE is here"
    ]


def test_two_commands_add_a_run_to_one_file_once(finished: Path, tmp_path: Path) -> None:
    """Both commands have read the empty file before either adds the run."""
    path = tmp_path / "runs.jsonl"
    run, *_ = make_runs(load_suite(finished / "tiny.toml"), finished / "out")
    commands = [FinishedRuns(path), FinishedRuns(path)]
    for command in commands:
        command.add(run)
    problems, row = map(json.loads, path.read_text().splitlines())
    assert (row["run"], row["agents"]["wren"]["problems"]) == (run.name, problems["id"])
    assert list(row["models"]) == ["team/wren/wren"]


def test_other_settings_are_refused(kept: Path, tmp_path: Path) -> None:
    change = ["agents.wren.learning_rate=1e-3"]
    with pytest.raises(UserError, match=r"learning_rate is 0\.0002 there and 0\.001 here"):
        compare(write_suite(tmp_path, **ALONE), tmp_path / "out", change, kept=kept)


def test_a_run_from_before_a_setting_existed_has_its_default(kept: Path, tmp_path: Path) -> None:
    problems, run = (json.loads(line) for line in kept.read_text().splitlines())
    assert run["settings"].pop("trust.max_source_weight") == 1.0
    old = tmp_path / "old.jsonl"
    old.write_text(f"{json.dumps(problems)}\n{json.dumps(run)}\n")
    suite = write_suite(tmp_path, **ALONE)
    [row] = compare(suite, tmp_path / "out", kept=old).rows
    assert row.seeds == (1,) and not list(tmp_path.glob("out/runs/*/*/*"))
    with pytest.raises(UserError, match=r"max_source_weight is None there and 0\.5 here"):
        compare(suite, tmp_path / "out", ["trust.max_source_weight=0.5"], kept=old)


@pytest.mark.parametrize("line", ["{", "[]", '{"run": "a"', '{"seed": 1}', "\udcff"])
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs.jsonl").write_text(line + "\n", "utf-8", "surrogateescape")
    broken = "runs.jsonl is not a file of .*invalid start" if line == "\udcff" else "line 1 is not"
    with pytest.raises(UserError, match=broken):
        compare(write_suite(tmp_path, **ALONE), tmp_path / "out", kept=tmp_path / "runs.jsonl")


def test_a_file_that_cannot_serve_is_refused_before_the_training(
    kept: Path, tmp_path: Path
) -> None:
    """A folder; a file without its line of problems; no file, and no finished run."""
    suite, (_, run) = write_suite(tmp_path, **ALONE), kept.read_text().splitlines()
    (tmp_path / "part.jsonl").write_text(run)
    for path, report_only, message in (
        (tmp_path, False, "is not a file of `hacrl compare`.*directory"),
        (tmp_path / "part.jsonl", True, "team/gspo/seed-1 or its line of problems is incomplete"),
        (tmp_path / "none.jsonl", True, "no run is finished, and there is no file .*none.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            compare(suite, tmp_path / "out", report_only=report_only, kept=path)
    assert not (tmp_path / "out").exists()


def test_runs_alone_serve_every_team_with_the_agent(tmp_path: Path) -> None:
    """gspo is trained in team a only. Team b has finch with the same settings, and takes its runs from
    there; c has it with another rate, d other prompts per step, and heron was never trained."""
    finch = {"name": "finch", "model": "pocket:finch", "learning_rate": 2e-4}
    teams = [
        {"name": "a", "agents": ["wren", "finch"]},
        {"name": "b", "agents": ["finch", "heron"]},
        {"name": "c", "agents": [finch | {"learning_rate": 1e-3}]},
        {"name": "d", "agents": ["finch"], "overrides": ["prompts_per_step=8"]},
    ]
    heron = {"name": "other", "teams": ["b"], "overrides": ["agents.heron.learning_rate=1e-3"]}
    arms = [{**SUITE["arms"][1], "teams": ["a"]}, {"name": "hacpo"}, heron]  # a has no heron
    suite = load_suite(write_suite(tmp_path, teams=teams, arms=arms, seeds=[1]))
    runs = make_runs(suite, tmp_path / "out")
    assert [run.name for run in runs if run.arm == "gspo"] == ["a/gspo/seed-1"]
    curve = (Point(0, 0, 0.0, 0.2), Point(1, 16, 1.0, 0.5))
    found = [
        AgentRun(run, agent, curve, {"p": 0.5}, updates=2, metrics={})
        for run in runs
        for agent in run.learners
    ]
    borrowed = _alone_elsewhere(suite, found, ())
    assert [(r.run.team, r.agent, r.run.arm) for r in borrowed] == [("b", "finch", "gspo")]
    assert borrowed[0].folder.relative_to(tmp_path).parts[2:4] == ("a", "gspo")


def test_the_plan_counts_what_the_command_would_train(kept: Path, tmp_path: Path) -> None:
    """Two arms, two seeds, one agent with 4 x 4 rollouts in its only step; gspo's seed 1 is kept."""
    suite = write_suite(tmp_path, **ALONE | {"seeds": [1, 2], "arms": SUITE["arms"]})
    out = tmp_path / "out"
    found = [(r.arm, r.runs, r.rollouts) for r in make_plan(suite, out)]
    assert found == [("hacpo", 2, 32), ("gspo", 2, 32)]
    found = [(r.arm, r.runs, r.rollouts) for r in make_plan(suite, out, only=["gspo"], kept=kept)]
    assert found == [("gspo", 1, 16)]


def test_an_arm_beside_the_stored_run_of_another_arm(tmp_path: Path) -> None:
    """The run that replays is the first of the suite and starts after the one that it replays."""
    wren = {"name": "wren", "model": "pocket:wren"}
    old = {"name": "old", "replay": "{runs}/alone/gspo/seed-{seed}"}
    teams = [{"name": "stored", "agents": [wren, old]}, {"name": "alone", "agents": [wren]}]
    arms = [
        {"name": "hacpo", "teams": ["stored"]},
        {"name": "gspo", "overrides": ["algorithm.name=gspo"], "teams": ["alone"]},
    ]
    suite = write_suite(tmp_path, seeds=[1], teams=teams, arms=arms)
    changes = ["steps=1", "evaluation.problems=2"]
    lost = "stored/hacpo/seed-1: it replays alone/gspo/seed-1, which is not finished"
    with pytest.raises(UserError, match=lost):
        compare(suite, tmp_path / "out", changes, only=["hacpo"])
    with pytest.raises(UserError, match=lost):
        compare(suite, tmp_path / "failed", [*changes, f"agents.wren.model={tmp_path / 'nowhere'}"])
    plan = make_plan(suite, tmp_path / "out", changes)
    assert {(row.arm, row.rollouts) for row in plan} == {("hacpo", 16), ("gspo", 16)}
    results = compare(suite, tmp_path / "out", changes, kept=tmp_path / "kept.jsonl")
    assert {(row.team, row.agent, row.arm) for row in results.rows} == {
        ("stored", "wren", "hacpo"),
        ("stored", "wren", "gspo"),
        ("alone", "wren", "gspo"),
    }
    log = (tmp_path / "out/runs/stored/hacpo/seed-1/metrics.jsonl").read_text().splitlines()
    assert [row["replayed"] for row in map(json.loads, log) if "replayed" in row] == [16]
    options = {"report_only": True, "kept": tmp_path / "kept.jsonl"}
    moved = compare(suite, tmp_path / "elsewhere", changes, **options)
    assert [row.after for row in moved.rows] == [row.after for row in results.rows]

    old["replay"] = "{runs}/alone/other/seed-{seed}"
    other = write_suite(tmp_path, seeds=[1], teams=teams, arms=arms)
    with pytest.raises(UserError, match="'alone/gspo/seed-1' there and 'alone/other/"):
        compare(other, tmp_path / "elsewhere", changes, **options)
    lines = options["kept"].read_text()
    options["kept"].write_text(lines.replace('"alone/gspo/seed-1"', '"seed-1"'))  # of an old file
    compare(other, tmp_path / "elsewhere", changes, **options)
