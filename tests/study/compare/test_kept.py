"""`hacrl compare --kept FILE` and `--teams`; runs alone that serve several teams."""

import json
import shutil
from pathlib import Path

import pytest
import tomli_w

from hacrl.errors import UserError
from hacrl.pocket import POCKET_CONFIG
from hacrl.study.compare import compare
from hacrl.study.compare.reading import AgentRun, Point
from hacrl.study.compare.report import as_json
from hacrl.study.compare.results import _alone_elsewhere
from hacrl.study.compare.suite import load_suite, make_runs

SMALL = """steps=1 prompts_per_step=4 samples_per_prompt=4 minibatch_samples=8 max_response_tokens=16
evaluation.problems=10 evaluation.samples=1 verifier.workers=0 checkpoint.save=false
log.tensorboard=false log.samples=false"""
SUITE = {
    "base": str(POCKET_CONFIG),
    "overrides": SMALL.split(),
    "seeds": [1],
    "reference": "gspo",
    "arms": [{"name": "gspo", "overrides": ["algorithm.name=gspo"]}],
    "teams": [{"name": "team", "agents": ["wren"]}],
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "tiny.toml").write_text(tomli_w.dumps(SUITE | changes))
    return folder / "tiny.toml"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the finished runs of seed 1; the run directories are gone."""
    folder = tmp_path_factory.mktemp("kept")
    compare(write(folder), folder / "out", kept=folder / "runs.jsonl")
    (folder / "results.json").write_text((folder / "out" / "results.json").read_text())
    shutil.rmtree(folder / "out")
    return folder / "runs.jsonl"


def test_a_report_from_the_file_equals_that_of_the_runs(kept: Path, tmp_path: Path) -> None:
    before = json.loads((kept.parent / "results.json").read_text())
    lines = kept.read_bytes()
    changes = ["runtime.threads=1", "verifier.workers=1"]  # may differ between machines
    again = as_json(compare(write(tmp_path), tmp_path / "out", changes, kept=kept))
    again = json.loads(json.dumps(again))
    for row in ("rows", "missing", "environment"):
        assert again[row] == before[row]
    assert kept.read_bytes() == lines and not list(tmp_path.glob("out/runs/*/*/*"))


def test_only_the_runs_that_are_not_in_the_file_are_trained(kept: Path, tmp_path: Path) -> None:
    both = shutil.copy(kept, tmp_path / "runs.jsonl")
    path = write(tmp_path, seeds=[1, 2])
    [row] = compare(path, tmp_path / "out", kept=both).rows
    assert row.seeds == (1, 2)
    assert [p.name for p in tmp_path.glob("out/runs/*/*/*/")] == ["seed-2"]
    problems, *runs = (json.loads(line) for line in both.read_text().splitlines())
    assert len(problems["problems"]) == 10
    assert [run["run"] for run in runs] == ["team/gspo/seed-1", "team/gspo/seed-2"]
    assert all(run["source"] == runs[0]["source"] and run["environment"]["torch"] for run in runs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "agents.wren.learning_rate=1e-3",
            "agents.wren.learning_rate is 0.0002 there and 0.001 here",
        ),
        ("evaluation.problems=9", "evaluation.problems is 10 there and 9 here"),
    ],
)
def test_other_settings_are_refused(kept: Path, tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(write(tmp_path), tmp_path / "out", [change], kept=kept)


@pytest.mark.parametrize("line", ["{", "[]", '{"run": "a"', '{"seed": 1}'])
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="line 1 is not a run of `hacrl compare`"):
        compare(write(tmp_path), tmp_path / "out", kept=tmp_path / "runs.jsonl")


def test_runs_alone_serve_every_team_with_the_agent(tmp_path: Path) -> None:
    """gspo is trained in team a only. Team b has finch with the same settings, and takes its runs from
    there; c has it with another rate, and heron was never trained."""
    finch = {"name": "finch", "model": "pocket:finch", "learning_rate": 2e-4}
    teams = [
        {"name": "a", "agents": ["wren", "finch"]},
        {"name": "b", "agents": ["finch", "heron"]},
        {"name": "c", "agents": [finch | {"learning_rate": 1e-3}]},
    ]
    arms = [{**SUITE["arms"][0], "teams": ["a"]}, {"name": "hacpo"}]
    suite = load_suite(write(tmp_path, teams=teams, arms=arms))
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
    write(tmp_path, teams=teams, arms=[{"name": "hacpo", "teams": ["a"]}], reference="hacpo")
    with pytest.raises(UserError, match="reference = 'hacpo' must train every team"):
        make_runs(load_suite(tmp_path / "tiny.toml"), tmp_path / "out")


def test_an_unknown_team_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--teams pair: no such team; teams: team"):
        compare(write(tmp_path), tmp_path / "out", teams=["pair"])
