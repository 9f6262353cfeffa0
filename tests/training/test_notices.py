"""Nothing is lost without a word: notes of whole runs, kept in notes.jsonl and shown by `show`."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from team import NO_EVALUATION, member, team
from typer.testing import CliRunner

import hacrl
from hacrl.cli import app
from hacrl.pocket import pocket_path
from hacrl.store.rundir import RunDirectory


def train(config: dict[str, Any], path: Path) -> tuple[RunDirectory, list[str]]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run = hacrl.train(config, path)
    return run, [str(w.message) for w in shown]


def command(*args: object) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    return result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, list[str]]:
    """A learning rate of 1000: accuracy falls from about 40 % to 0."""
    config = team(
        member("wren", learning_rate=1e3), steps=2, evaluation={"every": 1, "problems": 60}
    )
    return train(config, tmp_path_factory.mktemp("ruined") / "run")


def test_first_hour_13_a_collapse_is_named(ruined: tuple[RunDirectory, list[str]]) -> None:
    run, notes = ruined
    (note,) = [text for text in notes if "has become worse" in text]
    assert "learning_rate (now 1000)" in note and "after step 1" in note
    shown = " ".join(command("show", run.path)[0].split())
    assert "notes:" in shown and "'wren' has become worse" in shown


def test_first_hour_13_export_best_is_the_start_if_training_made_it_worse(
    ruined: tuple[RunDirectory, list[str]], tmp_path: Path
) -> None:
    run, _ = ruined
    out, note = command("export", run.path, "wren", tmp_path / "best", "--best")
    assert "no checkpoint of 'wren' is better than the start" in note
    assert "wren before training" in out
    exported = load_file(tmp_path / "best" / "model.safetensors")
    original = load_file(pocket_path("wren") / "model.safetensors")
    assert all((exported[name] == tensor).all() for name, tensor in original.items())


def test_first_hour_13_an_agent_without_signal_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never.py").write_text("def score(completion, **columns):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    verifier = {"kind": "function", "workers": 1, "options": {"path": "never:score"}}
    config = team(member("wren"), steps=7, verifier=verifier, **NO_EVALUATION)
    run, notes = train({**config, "prompts_per_step": 2}, tmp_path / "run")
    (note,) = [text for text in notes if "no training signal" in text]
    assert "the 5 steps up to step 5" in note and "mean reward 0)" in note
    assert note in [row["text"] for row in run.notes()]


def test_first_hour_3_long_prompts_and_rows_left_out_are_named(tmp_path: Path) -> None:
    """Two of eight questions are too long, two training rows are also held out. A run that starts
    again from the beginning repeats no note."""
    questions = [f"{i}+{i + 1}" for i in range(20, 28)]
    questions[:2] = [f"{q}{'+1' * 40}" for q in questions[:2]]
    rows = [{"id": f"p{i}", "question": q, "answer": "1"} for i, q in enumerate(questions)]
    held_out = [{"id": "h0", "question": "1+1", "answer": "2"}]
    held_out.append({"id": "h1", "question": "1+2", "answer": "3"})
    same = [{**row, "id": f"same-{row['id']}"} for row in held_out]
    for name, content in (("train", rows + same), ("held", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
    files = {"train": str(tmp_path / "train.jsonl"), "held_out": str(tmp_path / "held.jsonl")}
    config = team(
        *(member("wren"), member("finch")),
        **{**NO_EVALUATION, "checkpoint": {"every": 1}},
        task={"kind": "jsonl", **files},
        prompts_per_step=8,
        steps=2,
    )
    run, notes = train(config, tmp_path / "run")
    long = [text for text in notes if "max_prompt_tokens" in text]
    assert [text.split(":")[0] for text in long] == [
        f"agent '{name}' left out 2 of 8 problems in step 1" for name in ("wren", "finch")
    ]
    assert "longer than max_prompt_tokens = 64" in long[0]
    left_out = "these are left out: 2 ask the same as a held-out problem"
    assert sum(left_out in text and "of the 10 rows" in text for text in notes) == 1
    left_out = "were left out, because they are longer than max_prompt_tokens = 64"
    assert f"wren: 4 of 16 prompts {left_out}" in " ".join(command("show", run.path)[0].split())
    shutil.rmtree(run.path / "checkpoints")
    run.rewind(0)  # no step has metrics yet
    before = run.notes()
    hacrl.resume(run.path)
    *same, last = run.notes()
    assert same == before
    assert "starts again at step 1. Replies in the journals are not sampled again" in last["text"]


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")]
)
def test_a_failed_run_differs_from_a_stopped_one(
    tmp_path: Path, error: type[BaseException], state: str
) -> None:
    def stop(step: int, rows: object) -> None:
        raise error("api_key=abc")

    config = team(member("wren"), steps=2, **NO_EVALUATION)
    with pytest.raises(error):
        hacrl.train(config, tmp_path / "run", callbacks=[stop])
    run = RunDirectory.open(tmp_path / "run")
    assert run.state() == state and f"step 1 of 2, {state}" in command("show", run.path)[0]
    if state == "failed":
        assert run.error_path.read_text() == "ValueError: api_key=***\n"
    assert hacrl.resume(run.path).state() == "finished" and not run.error_path.exists()
