"""trust.judge_again: a learner uses its own verdicts on peers' texts, journalled before use."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from team import NO_EVALUATION, member, rows, snapshots, team

import hacrl
from hacrl import runs
from hacrl.errors import UserError
from hacrl.store.rundir import RunDirectory
from hacrl.training.hooks import Hooks
from hacrl.types import Status, Trajectory, Turn, Verdict
from hacrl.verify import VerifierPool

Tamper = Callable[[Any, int, list[Trajectory]], list[Trajectory]]
SETTINGS: dict[str, Any] = {**NO_EVALUATION, "steps": 2}
AGAIN: dict[str, Any] = {"trust": {"judge_again": True}}


def train(
    path: Path, tamper: Tamper | None = None, finch: dict[str, Any] | None = None, **settings: Any
) -> RunDirectory:
    agents = [member("wren"), member("finch", **(finch or {}))]
    return runs.start(team(*agents, **{**SETTINGS, **settings}), path, hooks=Hooks(tamper=tamper))


def learned(run: RunDirectory, agent: str = "wren") -> list[dict[str, Any]]:
    """All metrics of an agent but those of trust."""
    found = rows(run, agent)
    hidden = ("trust/", "samples/same_tokenizer", "samples/other_split")
    return [{k: v for k, v in row.items() if not k.startswith(hidden)} for row in found]


def only_finch(change: Callable[[Trajectory], Trajectory]) -> Tamper:
    def tamper(agent: Any, step: int, found: list[Trajectory]) -> list[Trajectory]:
        return [change(t) if agent.name == "finch" else t for t in found]

    return tamper


def lie(t: Trajectory) -> Trajectory:
    """Claims a success for every failure, and the reverse."""
    assert t.verdict is not None
    right = t.verdict.status is Status.OK
    return replace(t, verdict=Verdict(0.0, Status.WRONG) if right else Verdict(1.0, Status.OK))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("judged") / "run", **AGAIN)


def test_an_honest_team_learns_the_same(honest: RunDirectory, judged: RunDirectory) -> None:
    for agent, peer in (("wren", "finch"), ("finch", "wren")):
        assert learned(judged, agent) == learned(honest, agent)
        for row in rows(judged, agent):
            counts = {k: v for k, v in row.items() if k.startswith("trust/")}
            zeros = {f"trust/{what}/{peer}": 0 for what in ("unjudged", "disagree", "missing")}
            assert counts == {f"trust/judged/{peer}": 24, **zeros}


def test_details_and_tokenizers_are_not_published(
    honest: RunDirectory, judged: RunDirectory
) -> None:
    for run, shown in ((honest, True), (judged, False)):
        found = [t for s in snapshots(run, 2) for t in s.rows]
        assert any(t.verdict and t.verdict.detail for t in found) == shown
        assert {bool(t.tokenizer) for t in found} == {shown}


def test_false_rewards_change_nothing(honest: RunDirectory, tmp_path: Path) -> None:
    believed = train(tmp_path / "believed", only_finch(lie))
    assert learned(believed) != learned(honest)
    run = train(tmp_path / "run", only_finch(lie), **AGAIN)
    assert learned(run) == learned(honest)
    assert [row["trust/disagree/finch"] for row in rows(run, "wren")] == [24, 24]
    assert [row["trust/disagree/wren"] for row in rows(run, "finch")] == [0, 0]
    # The liar itself learns from its true rows.
    assert learned(run, "finch") == learned(honest, "finch")


def test_a_resumed_learner_judges_nothing_again(
    judged: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.open(Path(shutil.copytree(judged.path, tmp_path / "run")))
    shutil.rmtree(run.path / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(VerifierPool, "judge_all", lambda self, items: pytest.fail("judged again"))
        hacrl.resume(run.path)
    assert run.metrics_path.read_bytes() == judged.metrics_path.read_bytes()
    # A verdict in the journal is what counts, whatever the verifier would say.
    path = run.journal("wren") / "verdicts-000001.json"
    text = path.read_text()
    assert {row[4] for row in json.loads(text)["rows"]} <= set(Status)
    path.write_text(text.replace('"ok"', '"wrong"', 1))
    shutil.rmtree(run.path / "checkpoints")
    with pytest.raises(UserError, match=r"verdicts-000001.json.*delete it and run"):
        hacrl.resume(run.path)
    path.unlink()
    hacrl.resume(run.path)
    assert run.metrics_path.read_bytes() == judged.metrics_path.read_bytes()


def test_rows_without_text_count_only_if_their_source_is_trusted(tmp_path: Path) -> None:
    """hacpo: with untrusted outcomes only, wren learns as it does alone."""
    outcomes = {"publish": "rewards"}
    believed = train(tmp_path / "believed", finch=outcomes)
    untrusted = train(tmp_path / "untrusted", finch=outcomes, **AGAIN)
    trust = {"judge_again": True, "trusted": ["finch"]}
    trusted = train(tmp_path / "trusted", finch=outcomes, trust=trust)
    assert learned(trusted) == learned(believed)
    alone = hacrl.train(team(member("wren"), **SETTINGS), tmp_path / "alone")
    for found, expected in zip(rows(untrusted, "wren"), rows(alone, "wren"), strict=True):
        assert found["loss"] == expected["loss"] and found["capability/finch"] is None
        assert found["samples/drop/withheld"] == 24


def test_overlap_follows_the_successes_of_trusted_peers_only(tmp_path: Path) -> None:
    """finch claims log-probability 0, so rho < 1: a weight of 1 means that wren follows."""

    def certain(t: Trajectory) -> Trajectory:
        return replace(t, mean_logprob=0.0)

    def weights(name: str, trust: dict[str, Any]) -> list[float]:
        settings = {"algorithm": {"name": "overlap"}, "steps": 1, "prompts_per_step": 32}
        settings |= {"minibatch_samples": 256, "trust": trust}
        run = train(tmp_path / name, only_finch(certain), **settings)
        found = map(json.loads, (run.samples_folder("wren") / "step-000000.jsonl").open())
        return [row["weight"] for row in found if row["source"] == "finch"]

    trusted = weights("trusted", {"judge_again": True, "trusted": ["finch"]})
    untrusted = weights("untrusted", {"judge_again": True})
    assert 1.0 in trusted == weights("believed", {})
    assert len(untrusted) == len(trusted) and 0 < max(untrusted) < 1


def raises_on_boom(completion: str, answer: str, **columns: Any) -> float:
    if "boom" in completion:
        raise ValueError("boom")
    return float(answer in completion)


def test_a_text_that_cannot_be_judged_is_not_used(tmp_path: Path) -> None:
    def boom(t: Trajectory) -> Trajectory:
        turns = (Turn("assistant", "boom", True),)
        return replace(t, turns=turns, num_tokens=4, verdict=Verdict(1.0, Status.OK))

    function = {"path": f"{Path(__file__).stem}:raises_on_boom"}
    verifier = {"kind": "function", "options": function, "workers": 0}
    run = train(tmp_path / "run", only_finch(boom), verifier=verifier, **AGAIN)
    for row in rows(run, "wren"):
        assert row["trust/unjudged/finch"] == row["samples/drop/not_judged"] == 24
        assert row["trust/judged/finch"] == row["peers/samples"] == 0
        assert row["capability/finch"] is None


@pytest.mark.parametrize(
    ("trust", "reason"),
    [
        ({"quarantine": True}, "quarantine = true needs judge_again"),
        ({"trusted": ["finch"]}, "trusted has no meaning without judge_again"),
        ({"judge_again": True, "trusted": ["finsh"]}, "'finsh' is not one of wren, finch"),
    ],
)
def test_settings_that_contradict_each_other(trust: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        hacrl.train(team(member("wren"), member("finch"), trust=trust), "never")
