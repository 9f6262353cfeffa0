"""A run knows its inputs: a resume compares config, data, models and code, and names what differs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from own_files import HELPERS, OWN_TASK, REWARD, WITHIN, history, own_run, write_rows
from team import member, team

import hacrl
from hacrl import fingerprint
from hacrl.errors import UserError
from hacrl.policy.load import find_model
from hacrl.store.checkpoint import fingerprint_of
from hacrl.store.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return own_run(tmp_path)


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


def test_checkpoints_of_other_inputs_are_refused(run: RunDirectory) -> None:
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


def test_problems_of_another_source_are_noticed(tmp_path: Path) -> None:
    """A hub dataset or an own task can change without any file that the config names."""
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "kinds.txt").write_text("add sub")
    config = team(member("wren"), steps=1, task={"kind": f"{tmp_path}/own_task:make"})
    run = hacrl.train(config, tmp_path / "run")
    (tmp_path / "kinds.txt").write_text("add mul")
    with pytest.raises(UserError, match="the training problems of the task changed"):
        hacrl.resume(run.path, steps=2)
