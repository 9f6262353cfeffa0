"""A run knows its inputs: a resume compares config, data, models and code, and names what differs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from team import member, team

import hacrl
from hacrl import fingerprint
from hacrl.errors import UserError
from hacrl.pocket import pocket_path
from hacrl.policy.load import find_model
from hacrl.store.checkpoint import fingerprint_of
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import make_task

REWARD = """from helpers import contains
def score(completion, answer):
    return 1.0 if contains(completion, answer) else 0.0
"""
HELPERS = "from parts.text import within as contains\n"
WITHIN = "def within(text, part):\n    return part in text\n"


def write_rows(path: Path, count: int, first: int = 10) -> None:
    rows = [{"question": f"{i}+{i}", "answer": 2 * i} for i in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def own_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """A team of one on own data, with its own model folder and its own reward function."""
    write_rows(folder / "train.jsonl", 30)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "parts").mkdir()
    (folder / "parts" / "text.py").write_text(WITHIN)
    shutil.copytree(pocket_path("wren"), folder / "model")
    agent = {"name": "wren", "model": str(folder / "model"), "learning_rate": 2e-4}
    task = {"kind": "jsonl", "train": str(folder / "train.jsonl")}
    options = {"path": f"{folder}/rewards:score"}
    verifier = {"kind": "function", "options": options, "workers": 1, "timeout": 300}
    return team(agent, **{"steps": 2, "task": task, "verifier": verifier, **settings})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    with pytest.warns(
        UserWarning, match=r"evaluation\.problems = 12, but the task has \d held-out"
    ):
        return hacrl.train(own_config(tmp_path), tmp_path / "run")


def history(run: RunDirectory) -> list[dict[str, Any]]:
    return run.fingerprint()["history"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("train.jsonl", lambda path: write_rows(path, 29, first=11)),
        ("rewards.py", lambda path: path.write_text(REWARD.replace("0.0", "0.5"))),
        ("helpers.py", lambda path: path.write_text(HELPERS + "old = contains\n")),
        ("parts/text.py", lambda path: path.write_text(WITHIN.replace("part in", "part not in"))),
        ("model/generation_config.json", lambda path: path.write_text("{}")),
        ("model/tokenizer_config.json", lambda path: path.unlink()),
    ],
)
def test_first_hour_4_and_d2_a_changed_file_is_named(
    run: RunDirectory, tmp_path: Path, file: str, change: Any
) -> None:
    """Line 1 of the data removed, another reward, another model: refused, or accepted and recorded."""
    before = (run.metrics_path.read_bytes(), run.config_path.read_bytes())
    change(tmp_path / file)
    with pytest.raises(UserError, match=rf"{file} (was changed|is gone).*--accept-changed"):
        hacrl.resume(run.path, steps=3)
    assert (run.metrics_path.read_bytes(), run.config_path.read_bytes()) == before
    if file == "model/tokenizer_config.json":
        return
    with pytest.warns(UserWarning, match=rf"{file} was changed.*from step 3 on"):
        hacrl.resume(run.path, ["steps=3"], accept_changed=True)
    first, second = history(run)
    assert (first["step"], second["step"]) == (0, 2)
    assert [file in text for text in second["changes"]] == [True]
    assert fingerprint_of(run.checkpoints("wren"), 3) == second["digest"] != first["digest"]
    assert any(f"{file} was changed" in note["text"] for note in run.notes())


def test_first_hour_11_each_key_has_its_class(tmp_path: Path) -> None:
    """Free: workers, logging, steps. Noted: threads, micro-batches. Refused: the rest."""
    run = hacrl.train(team(member("wren"), steps=1), tmp_path / "run")
    free = ["verifier.workers=2", "log.tensorboard=true", "checkpoint.keep=1", "steps=2"]
    hacrl.resume(run.path, free)
    assert run.notes() == [] and len(history(run)) == 1
    config = run.config()
    assert (config.verifier.workers, config.log.tensorboard, config.steps) == (2, True, 2)
    with pytest.warns(UserWarning, match=r"agents\.wren\.microbatch_tokens: 16384 -> 64"):
        hacrl.resume(run.path, {"agents.wren.microbatch_tokens": 64, "steps": 3})
    assert [note["text"].count("from step 3 on") for note in run.notes()] == [1]
    with pytest.raises(UserError, match=r"algorithm\.epsilon_low: 0\.003 -> 0\.1.*accept-changed"):
        hacrl.resume(run.path, ["algorithm.epsilon_low=0.1", "runtime.threads=2", "steps=4"])
    assert run.config().steps == 3
    with pytest.warns(UserWarning, match=r"epsilon_low"):
        hacrl.resume(run.path, ["algorithm.epsilon_low=0.1", "steps=4"], accept_changed=True)
    assert [entry["step"] for entry in history(run)] == [0, 2, 3]
    with pytest.raises(UserError, match="has done 4 steps"):
        hacrl.resume(run.path, ["steps=3"], accept_changed=True)
    with pytest.raises(UserError, match="unknown key; did you mean 'threads'"):
        hacrl.resume(run.path, ["runtime.thread=1"])


def test_keys_of_the_classes_exist() -> None:
    """A renamed key must be renamed in FREE and ROUNDING too."""
    keys = {
        f"agents.*.{key}" if table == "agents" else f"{table}.{key}"
        for table, kind in {
            "agents": hacrl.config.AgentConfig,
            "evaluation": hacrl.config.EvaluationConfig,
            "sampler": hacrl.config.SamplerConfig,
            "runtime": hacrl.config.RuntimeConfig,
            "verifier": hacrl.config.VerifierConfig,
            "hub": hacrl.config.HubConfig,
        }.items()
        for key in kind.model_fields
    }
    keys |= set(hacrl.config.Config.model_fields) | {"torch", "transformers", "gpu"}
    listed = (*fingerprint.FREE.split(), *fingerprint.ROUNDING.split())
    tables = {"diagnostics.*", "checkpoint.*", "log.*"}
    assert {key.removesuffix("*") if key.endswith("s*") else key for key in listed} - tables <= keys


def test_unchanged_files_are_not_read_again(run: RunDirectory, monkeypatch: Any) -> None:
    """A resume with a model of 30 GB must not take minutes; a new time alone is no change."""

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was read again")

    with monkeypatch.context() as patched:
        patched.setattr(fingerprint, "sha256", refuse)
        hacrl.resume(run.path, steps=3)
    os.utime(run.path.parent / "train.jsonl")
    hacrl.resume(run.path, steps=4)
    assert len(history(run)) == 1


def test_checkpoints_of_other_inputs_are_refused(run: RunDirectory, tmp_path: Path) -> None:
    place = run.checkpoints("wren") / "step-000002" / "manifest.json"
    manifest = json.loads(place.read_text())
    assert manifest["fingerprint"] == history(run)[0]["digest"]
    place.write_text(json.dumps({**manifest, "fingerprint": "0" * 64}))
    with pytest.raises(UserError, match=r"manifest\.json: the checkpoint of step 2 was trained"):
        hacrl.resume(run.path, steps=3)


def test_a_run_without_a_fingerprint_says_so(run: RunDirectory) -> None:
    run.fingerprint_path.unlink()
    with pytest.warns(UserWarning, match=r"has no fingerprint\.json"):
        hacrl.resume(run.path, steps=3)
    assert len(history(run)) == 1
    run.fingerprint_path.write_text("{}")
    with pytest.raises(UserError, match=r"fingerprint\.json: .*check value"):
        hacrl.resume(run.path, steps=4)


def test_the_revision_of_a_hub_name_is_part_of_the_inputs(tmp_path: Path, monkeypatch: Any) -> None:
    """Without a network it is that of the local cache."""
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint.hub_revision("org/name") is None
    with pytest.raises(UserError, match=r"'org/name' is neither .*cannot be reached \(.*refused"):
        find_model("org/name", "wren")
    folder = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    for path, text in ((folder / "config.json", "{}"), (folder.parents[1] / "refs/main", "a" * 40)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert fingerprint.hub_revision("org/name") == "a" * 40
    assert find_model("org/name", "wren") == str(folder)
    old = {"config": {}, "files": {}, "problems": {}, "versions": {"hub revision of Q/q": "a"}}
    new = {**old, "versions": {"hub revision of Q/q": "b"}}
    assert [c.text for c in fingerprint.changes(old, new)] == ['hub revision of Q/q: "a" -> "b"']
    assert fingerprint.digest(old) != fingerprint.digest(new)


OWN_TASK = """
from pathlib import Path
from hacrl.tasks.arithmetic import ArithmeticTask
def make(config, seed, base):
    return ArithmeticTask(seed, tuple(Path(__file__).with_name("kinds.txt").read_text().split()))
"""


def test_problems_of_another_source_are_noticed(tmp_path: Path) -> None:
    """A hub dataset or an own task can change without any file that the config names."""
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "kinds.txt").write_text("add sub")
    config = team(member("wren"), steps=1, task={"kind": f"{tmp_path}/own_task:make"})
    run = hacrl.train(config, tmp_path / "run")
    (tmp_path / "kinds.txt").write_text("add mul")
    with pytest.raises(UserError, match="the training problems of the task changed"):
        hacrl.resume(run.path, steps=2)


# ---------------------------------------------------------------- before models are loaded


def no_model(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a model was loaded")


def test_first_hour_12_too_many_prompts_per_step_is_found_before_loading(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("hacrl.policy.policy.load_model", no_model)
    place = tmp_path / "run"
    with pytest.raises(UserError, match=r"prompts_per_step = 99 is not between 1 and 2\d"):
        hacrl.train(own_config(tmp_path, prompts_per_step=99), place)
    assert not place.exists()


def test_first_hour_5_few_held_out_problems_are_used_with_a_note(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The note comes before any model is loaded; "all" is a value and needs no note."""
    monkeypatch.setattr("hacrl.policy.policy.load_model", no_model)
    config = own_config(tmp_path)
    few = pytest.warns(UserWarning, match=r"evaluation\.problems = 12, but the task has")
    with few as notes, pytest.raises(AssertionError, match="was loaded"):
        hacrl.train(config, tmp_path / "run")
    assert len(notes) == 1
    config["evaluation"]["problems"] = "all"
    with pytest.raises(AssertionError, match="was loaded"):
        hacrl.train(config, tmp_path / "all")


def test_a_task_without_held_out_problems_is_found_before_loading(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("hacrl.policy.policy.load_model", no_model)
    (tmp_path / "own_task.py").write_text(
        OWN_TASK.replace("    return A", "    task = A")
        + "    task.held_out = lambda count: []\n    return task\n"
    )
    (tmp_path / "kinds.txt").write_text("add sub")
    config = team(member("wren"), steps=1, task={"kind": f"{tmp_path}/own_task:make"})
    with pytest.raises(UserError, match=r"evaluation\.problems = 12, but the task has no held-out"):
        hacrl.train(config, tmp_path / "run")


def test_first_hour_15_the_environment_has_the_threads_of_the_config(tmp_path: Path) -> None:
    config = hacrl.config.parse_config(team(member("wren"), runtime={"threads": 3}))
    run = RunDirectory.create(tmp_path / "run", config)
    assert json.loads((run.path / "environment.json").read_text())["threads"] == 3


@pytest.mark.parametrize("left", [["environment.json"], [".tmp-config.toml-1a"], [".lock"]])
def test_d20_a_kill_between_the_first_files_does_not_block_the_name(
    tmp_path: Path, left: list[str]
) -> None:
    config = hacrl.config.parse_config(team(member("wren")))
    run = RunDirectory.create(tmp_path / "run", config)
    if ".tmp-config.toml-1a" in left:
        run.config_path.rename(run.path / left[0])
    run.config_path.unlink(missing_ok=True)
    (run.path / ".lock").touch()
    again = RunDirectory.create(run.path, config)
    assert again.config() == config
    with again.locked():
        assert not list(run.path.glob(".tmp-*"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "environment.json").write_text("{}")
    with pytest.raises(UserError, match="not empty"):
        RunDirectory.create(foreign, config)


def test_an_accepted_change_of_the_data_samples_the_steps_after_the_checkpoint_again(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Step 2 is journalled but its checkpoint is lost; then every question changes."""
    first, second = (run.journal("wren") / f"step-00000{step}.jsonl" for step in (0, 1))
    old = first.read_bytes(), second.read_bytes()
    shutil.rmtree(run.checkpoints("wren") / "step-000002")
    write_rows(tmp_path / "train.jsonl", 30, first=50)
    with pytest.warns(UserWarning, match=r"train\.jsonl was changed.*from step 2 on"):
        hacrl.resume(run.path, ["steps=3"], accept_changed=True)
    assert first.read_bytes() == old[0]
    assert second.read_bytes() != old[1]
    assert run.steps_done() == 3


QUICK = {"evaluation": {"problems": 0}, "steps": 3}


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
