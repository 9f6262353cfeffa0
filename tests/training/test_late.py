"""Members that are away for some steps, stop learning, or could be late."""

from pathlib import Path

import pytest
from team import member, rows, team

import hacrl
from hacrl.config import parse_config
from hacrl.errors import UserError
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory

NO_EVALUATION = {"evaluation": {"problems": 0}, "checkpoint": {"every": 1, "keep": 9}}


def weights(run: RunDirectory, agent: str, step: int) -> dict:
    return Checkpoints(run.checkpoints(agent), 9).load(step).model


def same(a: dict, b: dict) -> bool:
    return all(a[key].equal(b[key]) for key in a)


def test_a_member_leaves_and_comes_back(tmp_path: Path) -> None:
    """finch is away in step 1 of 3: that snapshot has wren alone, wren learns alone from it, finch's
    weights rest, and in step 2 its capability is that of step 0 and step 2."""
    config = team(member("wren"), member("finch", away=[[1, 2]]), **NO_EVALUATION)
    run = hacrl.train(config, tmp_path / "run")
    pool = Pool(run.pool_path, read_only=True)
    members = [pool.snapshot(step).members for step in range(3)]
    assert members == [("wren", "finch"), ("wren",), ("wren", "finch")]
    assert not list(pool.rows(agent="finch", step=1))
    assert {t.policy_version for t in pool.rows("finch", 2)} == {1}  # steps learned
    assert [r["step"] for r in rows(run, "finch")] == [0, 2]
    assert [r["peers/samples"] > 0 for r in rows(run, "wren")] == [True, False, True]
    first, last = rows(run, "finch")
    assert last["capability/finch"] == pytest.approx((first["reward"] + last["reward"]) / 2)
    assert "capability/finch" not in rows(run, "wren")[1]
    assert same(weights(run, "finch", 1), weights(run, "finch", 2))
    assert not same(weights(run, "finch", 2), weights(run, "finch", 3))


def test_a_run_with_an_absence_resumes(tmp_path: Path) -> None:
    config = team(member("wren"), member("finch", away=[[1, 2]]), **NO_EVALUATION)
    unbroken = hacrl.train(config, tmp_path / "unbroken")
    run = hacrl.train(config, tmp_path / "run", steps=2)
    hacrl.resume(run.path, steps=3)
    assert run.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()


def test_one_agent_stops_learning_while_the_others_go_on(tmp_path: Path) -> None:
    config = team(member("wren"), member("finch", learn_steps=1), **NO_EVALUATION)
    run = hacrl.train(config, tmp_path / "run")
    assert ["updates" in r for r in rows(run, "finch")] == [True, False, False]
    assert all(r["updates"] > 0 and r["peers/samples"] > 0 for r in rows(run, "wren"))
    assert same(weights(run, "finch", 1), weights(run, "finch", 3))
    pool = Pool(run.pool_path, read_only=True)
    versions = [{t.policy_version for t in pool.rows("finch", step)} for step in range(3)]
    assert versions == [{0}, {1}, {1}]


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ({"deadline": 5.0}, "no effect with kind = 'local'"),
        ({"late": "go_on", "deadline": 5.0}, "no effect with kind = 'local'"),
        ({"kind": "ray", "late": "go_on"}, "needs a deadline"),
    ],
)
def test_settings_that_do_not_apply_are_refused(runtime: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_config(team(member("wren"), runtime=runtime))


def test_somebody_must_be_there_to_learn() -> None:
    absent = [member("wren", away=[[0, 2]]), member("finch", away=[[1, 3]])]
    with pytest.raises(UserError, match="in step 2 every learner is away"):
        parse_config(team(*absent))
    with pytest.raises(UserError, match="not a range of steps"):
        parse_config(team(member("wren", away=[[2, 2]]), member("finch")))
