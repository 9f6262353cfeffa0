"""Short forms of scripts/storms/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from storms import corruptions, fuzz, hub_requests, signals, wrong_inputs
from storms.wrong_inputs_kinds import KINDS

CHOSEN = {
    "reward -1 for half",
    "reward TRL list",
    "reward killed once",
    "reward raises always",
    "data byte order mark",
    "data null answer",
    "data some long prompts",
    "config unknown key",
}


def run(script: str, *options: str) -> str:
    """The output of a script in a process of its own: it forks, and this one may have used torch's
    threads."""
    path = Path(__file__).parents[2] / "scripts" / "storms" / script
    command = [sys.executable, str(path), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_damaged_files_are_noticed_repaired_or_harmless() -> None:
    outcomes = corruptions.storm(count=6, seed=1)
    assert [str(found) for found in outcomes if found.kind in corruptions.FINDINGS] == []


def test_malformed_configs_and_command_lines_end_with_a_message() -> None:
    assert fuzz.storm(count=60, seed=2026) == []


def test_killed_and_paused_runs_equal_undisturbed_ones() -> None:
    assert "3 interruptions" in run("kills.py", "--count", "3", "--setups", "gspo")


def test_signals_stop_a_run(tmp_path: Path) -> None:
    results = tmp_path / "shots.jsonl"
    shots = signals.storm(count=2, seed=0, longest=8.0, results=results)
    assert [str(shot) for shot in shots if shot.findings] == []
    stored = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["signal"] for row in stored] == ["SIGINT", "SIGTERM"] * 2
    assert all(0 <= row["seconds"] <= 5 for row in stored)


def test_wrong_inputs_are_right_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 200
    every = wrong_inputs.cases(sum(len(kind.teams) for kind in KINDS), seed=0)
    wanted = [(kind, team) for kind, team in every if kind.name in CHOSEN and team == "one"]
    assert {kind.name for kind, _ in wanted} == CHOSEN
    assert wrong_inputs.storm(wanted, tmp_path) == []


@pytest.mark.hub
def test_no_forged_request_is_accepted() -> None:
    assert hub_requests.storm(count=170, seed=2026) == []


@pytest.mark.hub
def test_killed_hubs_and_members_train_what_undisturbed_ones_train() -> None:
    output = run("hub_kills.py", "--count", "6", "--runs", "2", "--steps", "3")
    assert "run 2 (postgres)" in output and "in 2 runs: 0 findings" in output
