"""Agents that publish the trajectories of a stored run."""

import shutil
from pathlib import Path

import pytest
from team import NO_EVALUATION, member, rows, snapshots, team

import hacrl
from hacrl.errors import UserError


def test_a_stored_run_can_be_a_member(tmp_path: Path) -> None:
    """A run of finch alone, then wren learning with finch's stored trajectories: the same texts and
    verdicts as if finch had been there at the time."""
    stored = hacrl.train(team(member("finch"), **NO_EVALUATION), tmp_path / "stored")
    replay = {"name": "old-finch", "replay": str(stored.path)}
    run = hacrl.train(team(member("wren"), replay, **NO_EVALUATION), tmp_path / "run")
    for before, now in zip(snapshots(stored, 3), snapshots(run, 3), strict=True):
        old, new = (
            {
                (t.problem_id, t.index): (t.text, t.reward, t.mean_logprob)
                for t in snapshot.rows
                if t.agent == agent
            }
            for snapshot, agent in ((before, "finch"), (now, "old-finch"))
        )
        assert old == new
    assert all(r["peers/samples"] > 0 for r in rows(run, "wren"))
    assert all(r["replayed"] == 24 and r["rollouts"] == 0 for r in rows(run, "old-finch"))


def test_a_replay_member_takes_the_same_step_where_there_is_one(tmp_path: Path) -> None:
    """Six problems, six a step: every problem comes in every step, and each step replays its own."""
    lines = [
        f'{{"id": "p{i}", "question": "{i + 20}+{i + 31}", "answer": "{2 * i + 51}"}}'
        for i in range(6)
    ]
    (tmp_path / "six.jsonl").write_text("\n".join(lines) + "\n")
    task = {"kind": "jsonl", "train": str(tmp_path / "six.jsonl"), "held_out_fraction": 0.0}
    stored = hacrl.train(team(member("finch"), task=task, **NO_EVALUATION), tmp_path / "stored")
    replay = {"name": "old", "replay": str(stored.path)}
    run = hacrl.train(team(member("wren"), replay, task=task, **NO_EVALUATION), tmp_path / "run")

    def texts(snapshot, agent: str) -> list[str]:
        return [t.text for t in snapshot.rows if t.agent == agent]

    for before, now in zip(snapshots(stored, 3), snapshots(run, 3), strict=True):
        assert texts(now, "old") == texts(before, "finch")


def test_a_replay_member_names_its_agent(tmp_path: Path) -> None:
    stored = hacrl.train(
        team(member("wren"), member("finch"), steps=1, **NO_EVALUATION), tmp_path / "stored"
    )
    config = team(member("wren"), {"name": "old", "replay": str(stored.path)}, **NO_EVALUATION)
    with pytest.raises(UserError, match="wren, finch"):
        hacrl.train(config, tmp_path / "run")


def test_a_replay_member_keeps_what_it_published(tmp_path: Path) -> None:
    """The stored run grows between a kill and the resume, which is refused. When the run is as it was,
    the resume gives the same numbers."""
    stored = hacrl.train(team(member("finch"), steps=1, **NO_EVALUATION), tmp_path / "stored")
    replay = {"name": "old", "replay": str(stored.path)}
    settings = {"evaluation": {"problems": 0}, "checkpoint": {"every": 1}}
    run = hacrl.train(team(member("wren"), replay, steps=2, seed=3, **settings), tmp_path / "run")
    before = run.metrics_path.read_bytes()
    hacrl.resume(stored.path, steps=3)
    shutil.rmtree(run.path / "checkpoints")
    with pytest.raises(UserError, match="batches of"):
        hacrl.resume(run.path)
    for step in (1, 2):
        shutil.rmtree(stored.pool_path / f"step-00000{step}")
    hacrl.resume(run.path)
    assert run.metrics_path.read_bytes() == before


@pytest.mark.parametrize(
    ("verifier", "fits"),
    [
        ({"options": {"which": "first"}}, False),
        ({"options": {"which": "last"}, "workers": 0}, True),
    ],
)
def test_a_replayed_run_must_be_judged_with_the_same_options(
    verifier: dict, fits: bool, tmp_path: Path
) -> None:
    config = team(member("finch"), steps=1, **NO_EVALUATION)
    stored = hacrl.train(config, tmp_path / "stored")
    agents = [member("wren"), {"name": "old", "replay": str(stored.path)}]
    settings = {**NO_EVALUATION, "verifier": {**config["verifier"], **verifier}}
    config = team(*agents, steps=1, **settings)
    if fits:
        hacrl.train(config, tmp_path / "run")
        return
    with pytest.raises(UserError, match=r'options = .*"which": "last".*this run has .*"first"'):
        hacrl.train(config, tmp_path / "run")


def test_a_replayed_run_must_have_something_stored(tmp_path: Path) -> None:
    config = team(member("finch"), steps=1, **NO_EVALUATION)
    stored = hacrl.train(config, tmp_path / "stored")
    shutil.rmtree(stored.pool_path / "step-000000" / "finch")
    with pytest.raises(UserError, match="nothing to replay"):
        hacrl.train(
            team(member("wren"), {"name": "old", "replay": str(stored.path)}), tmp_path / "run"
        )
