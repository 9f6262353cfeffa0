"""Teams of any size, independent noise streams, frozen and absent agents."""

import copy
from pathlib import Path

import pytest
import torch
from team import NO_EVALUATION, member, rows, snapshots, team

import hacrl
from hacrl.config import parse_config
from hacrl.errors import RunStopped, UserError
from hacrl.policy import logprobs as logprobs_module
from hacrl.sampling import engine as engine_module
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.journal import Journal
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.types import Finish


def rollouts(run: RunDirectory, agent: str, step: int = 0) -> dict:
    entry = Journal(run.journal(agent)).read(step)
    return {(r.problem_id, r.index): r.completion.token_ids for r in entry[0]}


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_number_of_agents_trains(size: int, tmp_path: Path) -> None:
    """6 prompts x 4 samples in minibatches of 24: 1 update own, 1 for each peer."""
    models = {"wren": "wren", "finch": "finch", "heron": "heron", "w2": "wren", "f2": "finch"}
    names = list(models)[:size]
    members = [member(name, models[name]) for name in names]
    config = team(*members, steps=2, minibatch_samples=24, **NO_EVALUATION)
    run = hacrl.train(config, tmp_path / "run")
    for name in names:
        trained = rows(run, name)
        assert [r["step"] for r in trained] == [0, 1]
        assert all(r["updates_planned"] == size for r in trained)
        assert all(r["rollouts"] == 24 for r in trained)
        assert all(r["peers/samples"] + sum_drops(r, name) == 24 * (size - 1) for r in trained)
        assert Checkpoints(run.checkpoints(name), 2).steps() == [2]
    assert [len(c.groups) for c in snapshots(run, 2)] == [6, 6]


def sum_drops(row: dict, learner: str) -> float:
    own = row.get(f"samples/dropped/{learner}", 0)
    return sum(v for k, v in row.items() if k.startswith("samples/dropped/")) - own


def test_one_agent_under_hacpo_is_gspo_number_for_number(tmp_path: Path) -> None:
    base = team(member("wren"))
    runs = []
    for name in ("hacpo", "gspo"):
        config = copy.deepcopy(base)
        config["algorithm"]["name"] = name
        runs.append(hacrl.train(config, tmp_path / name))
    assert runs[0].metrics_path.read_bytes() == runs[1].metrics_path.read_bytes()


# ---------------------------------------------------------------- streams


def test_noise_streams_are_independent(tmp_path: Path) -> None:
    """Under gspo agents do not meet, so wren's whole run must stay the same to the last number when
    a third agent joins, the team is reordered, or row counts and micro-batches change."""
    base = team(member("wren"), member("finch"), **NO_EVALUATION)
    base["algorithm"]["name"] = "gspo"
    changed = {
        "third": [member("wren"), member("finch"), member("heron")],
        "reordered": [member("finch"), member("wren")],
        "rows": [member("wren", sampler_rows=5), member("finch")],
        "microbatch": [member("wren", microbatch_tokens=150), member("finch")],
    }
    plain = hacrl.train(base, tmp_path / "plain")
    for name, members in changed.items():
        other = hacrl.train({**base, "agents": members}, tmp_path / name)
        for step in range(2 if name == "microbatch" else 3):
            assert rollouts(other, "wren", step) == rollouts(plain, "wren", step), (name, step)
        if name in ("third", "reordered"):
            known = [
                {k: r[k] for k in p}
                for r, p in zip(rows(other, "wren"), rows(plain, "wren"), strict=True)
            ]
            assert known == rows(plain, "wren"), name


def test_two_agents_of_one_model_draw_differently(tmp_path: Path) -> None:
    config = team(member("a", "wren"), member("b", "wren"), steps=1, **NO_EVALUATION)
    run = hacrl.train(config, tmp_path / "run")
    assert rollouts(run, "a") != rollouts(run, "b")


# ---------------------------------------------------------------- members of other kinds


def test_a_frozen_member_samples_and_never_learns(tmp_path: Path) -> None:
    config = team(member("wren"), member("finch", learn=False), **NO_EVALUATION)
    run = hacrl.train(config, tmp_path / "run")
    assert all("updates" not in r for r in rows(run, "finch"))
    assert all(r["updates"] > 0 and r["peers/samples"] > 0 for r in rows(run, "wren"))
    assert Checkpoints(run.checkpoints("finch"), 1).steps() == []
    rows_of_all = (t for snapshot in snapshots(run, 3) for t in snapshot.rows)
    assert {t.policy_version for t in rows_of_all if t.agent == "finch"} == {0}


def test_agents_may_have_their_own_sizes_and_styles(tmp_path: Path) -> None:
    """wren samples 2, finch 4 with a system text and shorter replies; 12 own and 24 peers' samples
    in minibatches of 12 are 1 + 2 updates for wren, 2 + 1 for finch."""
    config = team(
        member("wren", samples_per_prompt=2),
        member("finch", system="Work it out.", max_response_tokens=12, mask_truncated=True),
        steps=1,
        **NO_EVALUATION,
    )
    run = hacrl.train(config, tmp_path / "run")
    (wren,), (finch,) = rows(run, "wren"), rows(run, "finch")
    assert (wren["rollouts"], finch["rollouts"]) == (12, 24)
    assert (wren["updates_planned"], finch["updates_planned"]) == (3, 3)
    assert max(len(ids) for ids in rollouts(run, "finch").values()) <= 12
    assert finch["samples/drop/too_long"] + finch["samples/drop/truncated"] > 0
    plain = hacrl.train(team(member("finch"), steps=1, **NO_EVALUATION), tmp_path / "plain")
    assert rollouts(plain, "finch") != rollouts(run, "finch")  # the system text was read


def test_a_prompt_too_long_for_one_agent_is_not_attempted_by_it(tmp_path: Path) -> None:
    """finch's prompts have 11, 11 and 10 tokens for the three operations: of 6 it attempts 2. If all
    were too long, it would take no part in the run."""
    members = member("wren"), member("finch", max_prompt_tokens=10)
    run = hacrl.train(team(*members, steps=1, **NO_EVALUATION), tmp_path / "run")
    (snapshot,) = snapshots(run, 1)
    left = [t for t in snapshot.rows if t.finish is Finish.NOT_ATTEMPTED]
    assert [t.agent for t in left] == ["finch"] * 4
    (wren,), (finch,) = rows(run, "wren"), rows(run, "finch")
    assert finch["not_attempted"] == wren["samples/drop/not_attempted"] == 4
    assert wren["updates_planned"] == 4
    config = team(member("finch", max_prompt_tokens=2), **NO_EVALUATION)
    with pytest.raises(UserError, match=r"'finch': every prompt .* max_prompt_tokens = 2"):
        hacrl.train(config, tmp_path / "short")


# ---------------------------------------------------------------- honesty


def test_stale_sampler_weights_stop_the_run(tmp_path: Path, monkeypatch) -> None:
    """A sampler that keeps the start weights: equal at step 0, caught at step 1."""
    real = engine_module.BuiltinSampler

    def stale(model, *rest, **settings):
        return real(copy.deepcopy(model), *rest, **settings)

    monkeypatch.setattr(engine_module, "BuiltinSampler", stale)
    config = team(member("wren"), **NO_EVALUATION)
    config["agents"][0]["learning_rate"] = 5e-3
    with pytest.raises(RunStopped, match="stale"):
        hacrl.train(config, tmp_path / "run")
    assert [r["step"] for r in rows(RunDirectory.open(tmp_path / "run"), "wren")] == [0]


def test_evaluation_draws_do_not_depend_on_the_step(tmp_path: Path) -> None:
    """A frozen model evaluated "after" two different numbers of steps gives the same replies, so that
    differences between evaluations are differences between weights."""
    texts = []
    for steps in (1, 2):
        config = team(member("wren", learning_rate=1e-30), evaluation={"every": 0, "problems": 12})
        run = hacrl.train(config, tmp_path / str(steps), steps=steps)
        texts.append((run.evaluation(steps, "wren") / "replies.jsonl").read_text())
        texts.append((run.evaluation(0, "wren") / "replies.jsonl").read_text())
    assert len(set(texts)) == 1


def test_non_finite_updates_in_a_row_stop_the_run_with_the_batch_saved(
    tmp_path: Path, monkeypatch
) -> None:
    real = logprobs_module.LogProbs.__call__

    def broken(self, rows):
        values = real(self, rows)
        return values * float("nan") if torch.is_grad_enabled() else values

    monkeypatch.setattr(logprobs_module.LogProbs, "__call__", broken)
    config = team(member("wren"), steps=8, **NO_EVALUATION)
    with pytest.raises(RunStopped, match="5 updates in a row"):
        hacrl.train(config, tmp_path / "run")
    assert list((tmp_path / "run").glob("broken-wren-step-*.jsonl"))


def test_adapters_and_whole_weights_in_one_team(tmp_path: Path) -> None:
    """wren trains an adapter, finch its whole weights; both learn, resume and export."""
    config = team(member("wren", lora={"rank": 4}, learning_rate=2e-3), member("finch"), steps=2)
    run = hacrl.train(config, tmp_path / "run")
    run = hacrl.resume(run.path, steps=3)
    unbroken = hacrl.train(config, tmp_path / "unbroken", steps=3)
    for name in ("wren", "finch"):
        assert all(r["updates"] == 4 and r["peers/samples"] > 0 for r in rows(run, name))
        assert rows(run, name) == rows(unbroken, name)
    tensors = Checkpoints(run.checkpoints("wren"), 2).load(3).model
    assert tensors and all("lora_" in name for name in tensors)


def test_the_resolved_config_can_be_run_again(tmp_path: Path) -> None:
    first = hacrl.train(team(member("wren"), steps=2), tmp_path / "first")
    second = hacrl.train(first.config_path, tmp_path / "second")
    assert second.metrics_path.read_bytes() == first.metrics_path.read_bytes()


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """The corrected config can use the same folder."""
    place = tmp_path / "run"
    for broken, words in (
        (team(member("wren"), minibatch_samples=2, **NO_EVALUATION), "minibatch_samples"),
        (team({"name": "a", "model": "/no/such/model"}, **NO_EVALUATION), "does not exist"),
        (team(member("wren"), max_prompt_tokens=9999, **NO_EVALUATION), "reads at most"),
    ):
        with pytest.raises(UserError, match=words):
            hacrl.train(broken, place)
        assert not place.exists()
    hacrl.train(team(member("wren"), steps=1, **NO_EVALUATION), place)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = hacrl.train(team(member("wren"), steps=1, **NO_EVALUATION), tmp_path / "run")
    with run.locked(), pytest.raises(UserError, match="another process"):
        hacrl.resume(run.path, steps=2)
    hacrl.resume(run.path, steps=2)


def test_a_run_that_cannot_be_resumed_says_why_and_stays_unchanged(tmp_path: Path) -> None:
    unsaved = team(member("wren"), steps=1, evaluation={"problems": 0}, checkpoint={"save": False})
    saved = team(member("wren"), steps=2, **NO_EVALUATION)
    for config, steps, words in ((unsaved, 2, "no checkpoints"), (saved, 1, "done 2 steps")):
        run = hacrl.train(config, tmp_path / words.replace(" ", "-"))
        before = [run.config_path.read_bytes(), run.metrics_path.read_bytes()]
        with pytest.raises(UserError, match=words):
            hacrl.resume(run.path, steps=steps)
        assert [run.config_path.read_bytes(), run.metrics_path.read_bytes()] == before


def test_a_pool_closed_by_other_members_is_refused(tmp_path: Path) -> None:
    run = hacrl.train(team(member("wren"), steps=1, **NO_EVALUATION), tmp_path / "run")
    run.set_config(parse_config(team(member("finch"), steps=1, **NO_EVALUATION)))
    with pytest.raises(UserError, match=r'agents: \["wren"\] -> \["finch"\]; /'):
        hacrl.resume(run.path)
    run.set_config(parse_config(team(member("wren"), steps=1, **NO_EVALUATION)))
    pool = Pool(run.pool_path)
    pool.publish(1, "finch", [])
    pool.close(1, ["finch"])
    with pytest.raises(UserError, match=r"closed with the agents finch, but the config has wren"):
        hacrl.resume(run.path, steps=2)


def test_gradient_checkpointing_trains_the_same_run(tmp_path: Path) -> None:
    """The sampler must not be left in training mode, where transformers has no cache."""
    plain = hacrl.train(team(member("wren")), tmp_path / "plain")
    config = team(member("wren", gradient_checkpointing=True))
    saving = hacrl.train(config, tmp_path / "saving")
    for step in range(3):
        assert rollouts(saving, "wren", step) == rollouts(plain, "wren", step)
    assert rows(saving, "wren", "evaluation") == rows(plain, "wren", "evaluation")


def test_tensorboard_of_a_resumed_run_is_that_of_an_unbroken_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = team(member("wren"), log={"tensorboard": True}, evaluation={"every": 1, "problems": 6})
    run = hacrl.train(config, tmp_path / "run", steps=2)
    folder = run.path / "tensorboard" / "wren"
    (first,) = folder.iterdir()
    before = first.read_bytes()
    hacrl.resume(run.path, steps=3)
    assert first.read_bytes() == before  # history is not written again
    assert len(list(folder.iterdir())) == 2
    events = EventAccumulator(str(folder))
    events.Reload()
    steps = {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["evaluation/accuracy"] == [0, 1, 2, 3]
    assert steps["train/reward"] == [0, 1, 2]
