"""A short form of scripts/storms/wrong_inputs.py."""

from pathlib import Path

import pytest
from storms.wrong_inputs import cases, storm
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


def test_wrong_inputs_are_right_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    every = cases(sum(len(kind.teams) for kind in KINDS), seed=0)
    wanted = [(kind, team) for kind, team in every if kind.name in CHOSEN and team == "one"]
    assert {kind.name for kind, _ in wanted} == CHOSEN
    assert storm(wanted, tmp_path) == []


def test_there_are_two_hundred_kinds() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 200
