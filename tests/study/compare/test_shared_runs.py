"""Runs that serve more than one arm or team: those of agents alone, and replays of other runs."""

import json
from pathlib import Path

import pytest
from tiny_suite import SUITE, write_suite

from hacrl.errors import UserError
from hacrl.study.compare import compare
from hacrl.study.compare.plan import make_plan
from hacrl.study.compare.reading import AgentRun, Point
from hacrl.study.compare.results import _alone_elsewhere
from hacrl.study.compare.suite import load_suite, make_runs


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
