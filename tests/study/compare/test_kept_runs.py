"""`hacrl compare --kept FILE`: finished runs are kept in a file and not trained again."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_suite import ALONE, SUITE, command, write_suite

from hacrl.errors import UserError
from hacrl.study.compare import compare
from hacrl.study.compare.benchmarks import evaluate_runs
from hacrl.study.compare.finished import FinishedRuns
from hacrl.study.compare.plan import make_plan
from hacrl.study.compare.report import as_json
from hacrl.study.compare.suite import SuiteBenchmarks, load_suite, make_runs


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the finished run of seed 1; its run directory is below `moved`."""
    folder = tmp_path_factory.mktemp("kept")
    compare(write_suite(folder, **ALONE), folder / "out", kept=folder / "runs.jsonl")
    (folder / "results.json").write_text((folder / "out" / "results.json").read_text())
    (folder / "out").rename(folder / "moved")
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


def test_no_command_is_shown_for_a_run_that_is_only_in_the_file(kept: Path, tmp_path: Path) -> None:
    write_suite(tmp_path, **ALONE)
    options = "--report", "--kept", kept
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, check=True)
    assert "report: " in done.stdout and " show " not in done.stdout
    text = (tmp_path / "out/report.md").read_text()
    assert f"tiny.toml --out {tmp_path / 'out'} --kept {kept}\n" in text


def test_only_the_runs_that_are_not_in_the_file_are_trained(kept: Path, tmp_path: Path) -> None:
    both = shutil.copy(kept, tmp_path / "runs.jsonl")
    path = write_suite(tmp_path, **ALONE | {"seeds": [1, 2]})
    [row] = compare(path, tmp_path / "out", kept=both).rows
    assert row.seeds == (1, 2)
    assert [p.name for p in tmp_path.glob("out/runs/*/*/*/")] == ["seed-2"]
    problems, *runs = (json.loads(line) for line in both.read_text().splitlines())
    assert len(problems["problems"]) == 10
    assert [run["run"] for run in runs] == ["team/gspo/seed-1", "team/gspo/seed-2"]


def test_the_plan_counts_what_the_command_would_train(kept: Path, tmp_path: Path) -> None:
    """Two arms, two seeds, one agent with 4 x 4 rollouts in its only step; gspo's seed 1 is kept."""
    suite = write_suite(tmp_path, **ALONE | {"seeds": [1, 2], "arms": SUITE["arms"]})
    out = tmp_path / "out"
    found = [(r.arm, r.runs, r.rollouts) for r in make_plan(suite, out)]
    assert found == [("hacpo", 2, 32), ("gspo", 2, 32)]
    found = [(r.arm, r.runs, r.rollouts) for r in make_plan(suite, out, only=["gspo"], kept=kept)]
    assert found == [("gspo", 1, 16)]


def test_benchmarks_leave_out_a_run_that_is_only_in_the_file(kept: Path, tmp_path: Path) -> None:
    suite, said = load_suite(write_suite(tmp_path, **ALONE)), list[str]()
    runs = FinishedRuns(kept).with_results(make_runs(suite, tmp_path / "out"))
    evaluate_runs(SuiteBenchmarks(names="math500"), runs, said.append)
    assert said == [
        "benchmarks: team/gspo/seed-1 is left out: only its line in --kept FILE is here"
    ]


def test_two_commands_add_a_run_to_one_file_once(kept: Path, tmp_path: Path) -> None:
    """Both commands have read the empty file before either adds the run."""
    path = tmp_path / "runs.jsonl"
    [run] = make_runs(load_suite(kept.parent / "tiny.toml"), kept.parent / "moved")
    for runs in [FinishedRuns(path), FinishedRuns(path)]:
        runs.add(run)
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
