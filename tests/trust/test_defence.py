"""Whole runs with quarantine and caps, against simulated bad peers; kills in between."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed import run_until_killed
from team import NO_EVALUATION, Notes, member, rows, team
from test_view import Tamper, lie, only_finch

import hacrl
from hacrl import runs
from hacrl.store.rundir import RunDirectory
from hacrl.training.hooks import Hooks
from hacrl.trust import quarantine
from hacrl.types import Trajectory

SETTINGS: dict[str, Any] = {**NO_EVALUATION, "steps": 3}
WATCHED = {"judge_again": True, "quarantine": True}


def train(
    path: Path, tamper: Tamper | None = None, notes: Notes | None = None, **settings: Any
) -> RunDirectory:
    config = team(member("wren"), member("finch"), **{**SETTINGS, "trust": WATCHED, **settings})
    return runs.start(config, path, observer=notes, hooks=Hooks(tamper=tamper))


def lower(t: Trajectory) -> Trajectory:
    """Half of the claimed log-probabilities are too low: s = e^3 = 20 times what it was."""
    assert t.mean_logprob is not None
    return replace(t, mean_logprob=t.mean_logprob - 3.0) if t.index % 2 else t


def half(agent: Any, step: int, found: list[Trajectory]) -> list[Trajectory]:
    return [t for t in found if agent.name != "finch" or t.index % 2]


def test_honest_agents_stay_and_learn_as_without_quarantine(tmp_path: Path) -> None:
    run, plain = train(tmp_path / "run"), train(tmp_path / "plain", trust={"judge_again": True})
    for agent, peer in (("wren", "finch"), ("finch", "wren")):
        for found, expected in zip(rows(run, agent), rows(plain, agent), strict=True):
            extra = {k: v for k, v in found.items() if k not in expected}
            assert {k: v for k, v in found.items() if k in expected} == expected
            assert extra.pop(f"trust/quarantined/{peer}") == 0
            log_s = [extra.pop(f"trust/log_ratio/p{decile}/{peer}") for decile in (10, 50, 90)]
            assert log_s == sorted(log_s) and log_s[0] < 0
            scores = {f"trust/score/{s}/{peer}" for s in ("claims", "invalid", "copies", "ratio")}
            assert set(extra) == scores and set(extra.values()) == {0}


def test_a_liar_is_left_out_until_it_was_honest_for_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 false claims are 24 log 10 = 55 > 10.60; the score stops at 21.19, twice that. 24 right
    claims are -2.29, so seven honest steps bring it below 5.30; the second such step is the last."""
    monkeypatch.setattr(quarantine, "CALM_STEPS", 2)

    def at_step_1(agent: Any, step: int, found: list[Trajectory]) -> list[Trajectory]:
        return only_finch(lie)(agent, step, found) if step == 1 else found

    notes = Notes()
    run = train(tmp_path / "run", at_step_1, notes, steps=11, minibatch_samples=24)
    found = [row["trust/quarantined/finch"] for row in rows(run, "wren")]
    assert found == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    for row, out in zip(rows(run, "wren"), found, strict=True):
        assert row["samples/drop/quarantined"] == (24 if out else 0)
        assert (row["peers/samples"] == 0) == bool(out)
    entered, left = [n for n in notes.notes if "'wren'" in n and "replies of 'finch'" in n]
    assert "from step 2 on (quarantine). Reason: its verdicts differ from those" in entered
    assert "uses the replies of 'finch' again from step 10 on" in left
    assert sum("disagrees with the verdicts of 'finch' on 24" in n for n in notes.notes) == 1
    assert all(row["trust/quarantined/wren"] == 0 for row in rows(run, "finch"))


@pytest.mark.parametrize(
    ("tamper", "missing", "reason"),
    [
        (only_finch(lie), 0, "its verdicts differ"),
        (only_finch(lower), 0, "its published log-probabilities are too low"),
        # 12 of the 24 rows that it has to publish in a step: 12 log 10 - 1.1 = 26 > 10.60.
        (half, 12, "or fewer replies than required"),
    ],
)
def test_with_its_peer_in_quarantine_a_learner_learns_alone(
    tamper: Tamper, missing: int, reason: str, tmp_path: Path
) -> None:
    notes = Notes()
    run = train(tmp_path / "run", tamper, notes)
    alone = hacrl.train(team(member("wren"), **SETTINGS), tmp_path / "alone")
    for found, expected in zip(rows(run, "wren"), rows(alone, "wren"), strict=True):
        assert found["loss"] == expected["loss"] and found["trust/quarantined/finch"] == 1
        assert found["trust/missing/finch"] == missing
    assert all(row["trust/missing/wren"] == 0 for row in rows(run, "finch"))
    assert any(reason in n for n in notes.notes)


def test_caps_in_a_run(tmp_path: Path) -> None:
    naive = {"name": "naive"}
    run = train(tmp_path / "ratio", only_finch(lower), trust={"max_ratio": 2.0}, algorithm=naive)
    for row in rows(run, "wren"):
        assert 8 <= row["samples/drop/ratio"] <= 12
        assert row["trust/log_ratio/p90/finch"] > 2 > 0 > row["trust/log_ratio/p10/finch"]
        assert row["samples/kept/finch"] + row["samples/dropped/finch"] == 24
    capped = train(tmp_path / "samples", trust={"max_source_fraction": 0.25})
    for row in rows(capped, "wren"):
        assert (row["samples/kept/finch"], row["samples/dropped/finch"]) == (8, 16)  # 8 of 24 + 8
        assert row["samples/drop/capped"] >= 14
    weighed = train(tmp_path / "weights", trust={"max_source_weight": 0.1})
    for row in rows(weighed, "wren"):
        assert row["peers/samples"] >= 22 and 0 < row["trust/factor/finch"] < 1
    amounts = dict.fromkeys(("wren", "finch"), 0.0)
    for row in map(json.loads, (weighed.samples_folder("wren") / "step-000000.jsonl").open()):
        amounts[row["source"]] += abs(row["advantage"] * row["weight"])
    assert amounts["finch"] / sum(amounts.values()) == pytest.approx(0.1)


KILLED = team(member("wren"), member("finch"), trust=WATCHED)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return hacrl.train(KILLED, tmp_path_factory.mktemp("unbroken") / "run")


@pytest.mark.parametrize(
    "moment", ["judging peers", "between verdicts and quarantine", "after quarantine"]
)
def test_killed_and_resumed_equals_unbroken(
    moment: str, unbroken: RunDirectory, tmp_path: Path
) -> None:
    """Metrics, weights and the journals, with verdicts and standings, are byte for byte the same."""
    run_until_killed(KILLED, tmp_path / "run", moment)
    run = hacrl.resume(tmp_path / "run")
    assert run.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()

    def files(found: RunDirectory) -> dict[str, bytes]:
        patterns = ("journal/*/*", "checkpoints/*/*/model.safetensors")
        paths = [p for pattern in patterns for p in found.path.glob(pattern)]
        return {str(p.relative_to(found.path)): p.read_bytes() for p in paths}

    assert files(run) == files(unbroken)
    assert sum("verdicts-" in name for name in files(run)) == 6
    assert sum("quarantine-" in name for name in files(run)) == 6
