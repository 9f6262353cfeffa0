"""An accepted change of the inputs: which steps are sampled again, and what of the run stays."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from own_files import history, own_run, write_rows
from team import member, team

import hacrl
from hacrl import fingerprint
from hacrl.errors import UserError
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import make_task

QUICK = {"evaluation": {"problems": 0}, "steps": 3}


def test_an_accepted_change_of_the_data_samples_the_steps_after_the_checkpoint_again(
    tmp_path: Path,
) -> None:
    """Step 2 is journalled but its checkpoint is lost; then every question changes."""
    run = own_run(tmp_path)
    first, second = (run.journal("wren") / f"step-00000{step}.jsonl" for step in (0, 1))
    old = first.read_bytes(), second.read_bytes()
    shutil.rmtree(run.checkpoints("wren") / "step-000002")
    write_rows(tmp_path / "train.jsonl", 30, first=50)
    with pytest.warns(UserWarning, match=r"train\.jsonl was changed.*from step 2 on"):
        hacrl.resume(run.path, ["steps=3"], accept_changed=True)
    assert first.read_bytes() == old[0]
    assert second.read_bytes() != old[1]
    assert run.steps_done() == 3


def test_an_accepted_change_judges_the_steps_after_the_checkpoint_again(tmp_path: Path) -> None:
    """Verdicts and standings of steps that are sampled again belong to other replies."""
    trust = {"judge_again": True, "quarantine": True}
    settings = {**QUICK, "trust": trust, "checkpoint": {"every": 1, "keep": 3}}
    run = hacrl.train(team(member("wren"), member("finch"), **settings), tmp_path / "run")
    journal = run.journal("wren")
    kept = {path: path.read_bytes() for path in journal.glob("*-000000.*")}
    before = {path: path.read_bytes() for path in journal.glob("*-000002.*")}
    for name in ("wren", "finch"):
        for step in (2, 3):
            shutil.rmtree(run.checkpoints(name) / f"step-00000{step}")
    with pytest.warns(UserWarning, match=r"learning_rate.*from step 2 on"):
        hacrl.resume(run.path, ["agents.0.learning_rate=1e-3"], accept_changed=True)
    assert len(kept) == len(before) == 3  # rollouts, verdicts, standings
    assert all(path.read_bytes() == old for path, old in kept.items())
    assert all(path.read_bytes() != old for path, old in before.items())
    assert run.steps_done() == 3


@pytest.mark.parametrize(
    "change", [{"max_response_tokens": 14}, {"samples_per_prompt": 2, "minibatch_samples": 6}]
)
def test_capability_counts_steps_of_larger_limits(change: dict[str, Any], tmp_path: Path) -> None:
    run = hacrl.train(
        team(member("wren"), member("finch"), **{**QUICK, "steps": 2}), tmp_path / "run"
    )
    with pytest.warns(UserWarning, match="from step 3 on"):
        hacrl.resume(run.path, {"steps": 3, **change}, accept_changed=True)
    last = run.metric_rows("train", "wren")[-1]
    for name in ("wren", "finch"):
        rewards = [row["reward"] for row in run.metric_rows("train", name)]
        assert last[f"capability/{name}"] == pytest.approx(sum(rewards) / 3)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"seed": 5}, False),
        ({"agents.wren.publish": "successes"}, False),
        ({"max_prompt_tokens": 5}, True),
    ],
)
def test_a_batch_from_before_an_accepted_change_is_written_again_only_if_it_is_the_same(
    change: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    run = hacrl.train(team(member("wren"), **{**QUICK, "steps": 2}), tmp_path / "run")
    with pytest.warns(UserWarning, match="from step 3 on"):
        hacrl.resume(run.path, {"steps": 3, **change}, accept_changed=True)
    (batch,) = (run.pool_path / "step-000001" / "wren").iterdir()
    before = batch.read_bytes()
    batch.write_bytes(b"damaged")
    if same:
        hacrl.resume(run.path, steps=4)
        assert batch.read_bytes() == before
        return
    for _ in range(2):
        with pytest.raises(UserError, match=r"inputs of the run have changed since\. Restore"):
            hacrl.resume(run.path, steps=4)


def files(run: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("runtime", ["local", "processes"])
def test_an_accepted_change_that_cannot_be_trained_changes_no_file(
    runtime: str, tmp_path: Path
) -> None:
    """Too small updates, and a model that does not exist: nothing of the run was to be lost."""
    settings = {**QUICK, "steps": 2, "runtime": {"kind": runtime, "threads": 1, "device": "cpu"}}
    run = hacrl.train(team(member("wren"), **settings), tmp_path / "run")
    shutil.rmtree(run.checkpoints("wren") / "step-000002")
    before = files(run)
    for change in ({"minibatch_samples": 3}, {"agents.wren.model": str(tmp_path / "gone")}):
        refused = pytest.raises(UserError, match=r"minibatch_samples = 3|gone")
        with pytest.warns(UserWarning, match="changed inputs"), refused:
            hacrl.resume(run.path, change, accept_changed=True)
        assert files(run) == before


def test_a_kill_before_the_replies_of_old_inputs_are_removed(tmp_path: Path) -> None:
    """The change is stored, the run is killed while it loads: the next resume removes them."""
    run = hacrl.train(team(member("wren"), **QUICK), tmp_path / "run")
    shutil.rmtree(run.checkpoints("wren") / "step-000003")
    replies = run.journal("wren") / "step-000002.jsonl"
    before = replies.read_bytes()
    config = hacrl.config.change_config(run.config(), {"agents.wren.learning_rate": 0.1, "seed": 4})
    task = make_task(config.task, config.seed, run.path)
    fingerprint.check_inputs(config, task, run, lambda text: None, accept_changed=True)
    run.set_config(config)
    hacrl.resume(run.path)
    assert replies.read_bytes() != before
    assert history(run)[1]["sampled_again"] and "pending" not in history(run)[1]


def test_an_agent_may_leave_the_team(tmp_path: Path) -> None:
    """The steps before, in which it took part, are still read for the capability of the others."""
    three = [member("wren"), member("finch"), member("heron")]
    run = hacrl.train(team(*three, **{**QUICK, "steps": 2}), tmp_path / "run")
    config = run.config()
    run.set_config(config.model_copy(update={"agents": config.agents[:2]}))
    with pytest.warns(UserWarning, match=r"agents: .*heron"):
        hacrl.resume(run.path, ["steps=3"], accept_changed=True)
    rewards = [row["reward"] for row in run.metric_rows("train", "finch")]
    last = run.metric_rows("train", "wren")[-1]
    assert last["capability/finch"] == pytest.approx(sum(rewards) / 3)
    assert last["peers/samples"] == 24 and last["samples/drop/invalid"] == 0


def test_the_task_of_an_agent_that_withholds_replies_may_change(tmp_path: Path) -> None:
    """Its own replies of earlier steps are read from its journal; their problems are unknown now."""
    agents = [member("wren", publish="successes"), member("finch")]
    run = hacrl.train(team(*agents, **{**QUICK, "steps": 2}), tmp_path / "run")
    with pytest.warns(UserWarning, match=r"seed: 3 -> 4"):
        hacrl.resume(run.path, ["seed=4", "steps=3"], accept_changed=True)
    last = run.metric_rows("train", "wren")[-1]
    assert last["capability/wren"] == last["reward"] and last["own/samples"] == 24


def test_a_change_and_a_corrupted_checkpoint_sample_again_from_the_older_one(
    tmp_path: Path,
) -> None:
    """The change is accepted at step 3, but the checkpoint of step 3 is corrupted, so training goes back
    to step 1. Step 3 then has other weights than those that wrote the replies in its journal."""
    settings = {**QUICK, "minibatch_samples": 24, "checkpoint": {"every": 1, "keep": 3}}
    run = hacrl.train(team(member("wren"), **settings), tmp_path / "run")
    for step in (2, 3):
        path = run.checkpoints("wren") / f"step-00000{step}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    change = {"agents.0.learning_rate": 1e-3, "steps": 4}
    with pytest.warns(UserWarning, match="replies from step 2 on are sampled again"):
        hacrl.resume(run.path, change, accept_changed=True)
    for step in range(4):
        found = [row["ratio"] for row in run.sample_rows(step, "wren")]
        ratios = [ratio for ratio in found if ratio is not None]
        assert ratios and ratios == pytest.approx([1.0] * len(ratios), abs=1e-4)
    assert [entry["step"] for entry in history(run)] == [0, 1]
    before = run.metrics_path.read_bytes()
    shutil.rmtree(run.checkpoints("wren") / "step-000004")
    hacrl.resume(run.path)  # the replies belong to the weights now
    assert run.metrics_path.read_bytes() == before


def test_an_accepted_change_removes_checkpoints_that_only_some_agents_have(tmp_path: Path) -> None:
    """Otherwise wren's could count as soon as finch has saved step 2, too, with the new inputs."""
    run = hacrl.train(team(member("wren"), member("finch"), **QUICK), tmp_path / "run")
    saved = [run.checkpoints(name) / "step-000003" for name in ("wren", "finch")]
    shutil.rmtree(saved[1])
    run.forget_from(2)
    assert not saved[0].exists() and saved[0].with_name("step-000002").exists()
