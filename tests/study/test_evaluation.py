"""`hacrl eval` of a run: overrides, and data that has changed."""

import json
import shutil
from pathlib import Path

import pytest
from team import member, team

from hacrl.errors import UserError
from hacrl.runs import start
from hacrl.store.rundir import RunDirectory
from hacrl.study.evaluation import evaluate_held_out
from hacrl.study.inspect.samples import find_samples
from hacrl.view.source import Source

CHANGED = "the data has changed since the run was trained"


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step with 12 training problems, of which it holds out others."""
    folder = tmp_path_factory.mktemp("own")
    files = {"train": range(12), "held_out": range(20, 24), "mixed": (*range(10, 12), 20)}
    for name, numbers in files.items():
        write_questions(folder / f"{name}.jsonl", {i: i + 30 for i in numbers})
    paths = {key: str(folder / f"{key}.jsonl") for key in ("train", "held_out")}
    settings = {"task": {"kind": "jsonl", **paths}, "evaluation": {"problems": "all"}}
    start(team(member("wren"), steps=1, **settings), folder / "run")
    return folder


def write_questions(path: Path, answers: dict[int, int]) -> None:
    rows = [{"id": i, "question": f"{i}+30", "answer": answer} for i, answer in answers.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_eval_says_how_many_problems_were_trained_on(own_data: Path, tmp_path: Path) -> None:
    """10+30 and 11+30 of mixed.jsonl are training problems, also behind another prompt; 20+30 is not."""
    notes: list[str] = []
    for prompt in ("{question}", "{question}="):
        changes = [f"task.held_out={own_data / 'mixed.jsonl'}", f"task.prompt={prompt}"]
        evaluate_held_out(str(own_data / "run"), changes, out=tmp_path, report=notes.append)
    trained_on = "2 of the 3 problems are training problems of"
    assert sum(note.startswith(trained_on) for note in notes) == 2


def test_eval_of_a_gym_says_how_many_problems_were_trained_on(tmp_path: Path) -> None:
    """With a fraction of 0.9 in place of 0.2, most of the held-out problems were trained on."""
    pytest.importorskip("reasoning_gym")
    gym = [{"name": "gcd", "draws": 50, "prompt": "gcd {numbers[0]} {numbers[1]}"}]
    task = {"kind": "gym", "gym": gym, "held_out_fraction": 0.2}
    start(team(member("wren"), steps=1, prompts_per_step=2, task=task), tmp_path / "run")
    notes: list[str] = []
    evaluate_held_out(
        str(tmp_path / "run"), ["task.held_out_fraction=0.9"], out=tmp_path, report=notes.append
    )
    assert any("are training problems of" in note for note in notes)


def test_eval_uses_overrides_of_the_run_s_agents(own_data: Path, tmp_path: Path) -> None:
    """One token a reply. A run has its own config."""
    changes, notes = ["agents.wren.max_response_tokens=1"], []
    [(_, result)], _ = evaluate_held_out(
        str(own_data / "run"), changes, out=tmp_path, report=notes.append
    )
    assert result.reply_tokens == 1
    assert notes == ["wren: 4 problems x 1 replies"]
    evaluate_held_out(str(own_data / "run"), out=tmp_path, report=notes.append)
    assert notes[1] == f"replaces the evaluation of wren in {tmp_path}; --out FOLDER keeps both"
    with pytest.raises(UserError, match="key=value instead of --config"):
        evaluate_held_out(str(own_data / "run"), config=own_data / "run" / "config.toml")


def test_paths_in_overrides_of_a_run_start_at_the_current_folder(
    own_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_data)
    changes, notes = ["task.held_out=mixed.jsonl"], []
    evaluate_held_out(str(own_data / "run"), changes, out=tmp_path, report=notes.append)
    assert notes[-1] == "wren: 3 problems x 1 replies"


def test_changed_data_is_named(own_data: Path, tmp_path: Path) -> None:
    """`samples` and `view` do not show a question that the replies do not answer."""
    copy = shutil.copytree(own_data / "run", tmp_path / "run")
    write_questions(tmp_path / "train.jsonl", {i: i + 31 for i in range(12)})
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(config.replace(str(own_data / "train"), f"{tmp_path}/train"))
    notes: list[str] = []
    for run in (RunDirectory.open(own_data / "run"), RunDirectory.open(copy)):
        found = find_samples(run, None, None, None, notes.append)
        assert bool(found.problems) is (run.path != copy)
        (known, why) = Source(run.path).problems({"id": "run"}, 0)
        assert (bool(known), why) == (run.path != copy, "" if run.path != copy else CHANGED)
    evaluate_held_out(str(copy), out=tmp_path / "eval", report=notes.append)
    assert len(notes) == 3 and all("changed since" in text for text in notes[:2])
