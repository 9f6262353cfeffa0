"""`hacrl init` and `hacrl schema`: from a data file to a config that doctor accepts and that trains."""

import json
import os
import pty
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cli_helpers import ROOT, accepted, hacrl, refused, write

from hacrl.config import load_config
from hacrl.errors import UserError
from hacrl.pocket import pocket_path
from hacrl.study.init.data import guess_verifier, read_data
from hacrl.study.init.team import start_team

SUMS = [{"problem": f"{a}+{b}=", "solution": a + b} for a in range(1, 7) for b in range(1, 7)]
POCKET = ("--model", "pocket:wren", "--model", "pocket:finch")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_team_from_flags_trains(tmp_path: Path) -> None:
    data, config = write_rows(tmp_path / "sums.jsonl", SUMS), tmp_path / "team.toml"
    out, _ = accepted("init", config, *POCKET, "--data", data)
    assert "question: column 'problem', answer: column 'solution'" in out
    assert "number fits, because all 36 answers are numbers" in out
    assert f"train {config}" in out
    lines = config.read_text().splitlines()
    assert len({line.index(" # ") for line in lines if " # " in line[1:]}) == 1
    settings = load_config(config)
    assert settings.task.train == str(data)
    assert [agent.model for agent in settings.agents] == ["pocket:wren", "pocket:finch"]
    out, _ = accepted("doctor", config, "--json")
    checks = json.loads(out)["checks"]
    assert "agent wren" in [c["what"] for c in checks] and all(c["good"] for c in checks)
    accepted("train", config, "steps=1", "evaluation.problems=0", "--run", tmp_path / "r")
    assert "exists" in refused("init", config, *POCKET, "--data", data)


@pytest.mark.parametrize("answer", [None, "answer"])
def test_a_team_from_conversations(tmp_path: Path, answer: str | None) -> None:
    """The answer is a column, or the last message. The prompt limit counts the system message."""

    def row(a: int) -> dict[str, Any]:
        system = {"role": "system", "content": "Add. " * 20}
        chat = [system, {"role": "user", "content": f"{a}+1="}]
        reply = {"role": "assistant", "content": str(a + 1)}
        return {"messages": chat, "answer": a + 1} if answer else {"messages": [*chat, reply]}

    data = write_rows(tmp_path / "chat.jsonl", [row(a) for a in range(40)])
    config = tmp_path / "team.toml"
    out, _ = accepted("init", config, *POCKET, "--data", data, "--steps", "1")
    source = "column 'answer'" if answer else "the last message"
    assert f"40 rows; question: column 'messages', answer: {source}" in out
    settings = load_config(config)
    assert (settings.verifier.kind, settings.task.columns.messages) == ("number", "messages")
    assert settings.max_prompt_tokens > 100
    accepted("doctor", config)


def test_an_own_reward_is_written_and_used(tmp_path: Path) -> None:
    odd = 'a"""\\'  # would end the docstring of the reward
    rows = [{"question": f"{n}+1=", "answer": str(n + 1), "level": 1, odd: 0} for n in range(40)]
    data, config = write_rows(tmp_path / "d.jsonl", rows), tmp_path / "team.toml"
    flags = ("--data", data, "--reward", "own", "--steps", "3")
    out, _ = accepted("init", config, *POCKET, *flags)
    assert f"doctor {config} --trust-code" in out
    assert "other columns of the row: level, a" in (tmp_path / "rewards.py").read_text()
    score = runpy.run_path(str(tmp_path / "rewards.py"))["score"]
    assert odd in score.__doc__
    assert [score(reply, "7") for reply in ("3+4=7", "17", "?")] == [1.0, 0.0, 0.0]
    assert load_config(config).steps == 3
    out, _ = accepted("doctor", config, "--trust-code")
    assert "a reply with the answer of the first problem gets reward 1" in out
    small = ["steps=1", "evaluation.problems=0", "verifier.timeout=300", "checkpoint.save=false"]
    _, err = accepted("train", config, *small, "--run", tmp_path / "run")
    assert "failed" not in err
    (tmp_path / "rewards.py").write_text("def score(completion, answer):\n    return 0\n")
    out, _ = accepted("doctor", config, "--trust-code")
    assert "gets reward 0, the smallest one" in " ".join(out.split())
    (tmp_path / "rewards.py").write_text("def score(completion, answer):\n    return 1 / 0\n")
    code, out, _ = hacrl("doctor", config, "--trust-code")
    assert code == 2 and "no  verifier: function does not judge" in out and "ZeroDivision" in out


def test_a_reward_that_exists_is_used_and_no_other_is_written(tmp_path: Path) -> None:
    """A file in the folder would come before an installed package of the same name."""
    data = write_rows(tmp_path / "sums.jsonl", SUMS)
    flags = (*POCKET, "--data", data, "--reward")
    wrong = refused("init", tmp_path / "a.toml", *flags, "scores.py:near")
    assert "scores.py does not exist; `--reward own` writes one" in wrong
    accepted("init", tmp_path / "b.toml", *flags, "installed.rewards:score")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.toml", "sums.jsonl"]
    (tmp_path / "scores.py").write_text("def near(completion): return 1.0\n")
    out, _ = accepted("init", tmp_path / "c.toml", *flags, "scores.py:near")
    assert f"near of {tmp_path / 'scores.py'}, which exists" in out


def test_the_smallest_team_has_a_plan(tmp_path: Path) -> None:
    """A step of one problem: the minibatch holds its whole group."""
    data, config = write_rows(tmp_path / "three.jsonl", SUMS[:3]), tmp_path / "team.toml"
    accepted("init", config, *POCKET, "--data", data)
    settings = load_config(config)
    assert settings.minibatch_samples == settings.samples_per_prompt
    accepted("doctor", config)


@pytest.mark.parametrize("steps", ["abc", "0", "-5"])
def test_steps_that_are_no_number_are_refused(tmp_path: Path, steps: str) -> None:
    given = (tmp_path / "team.toml", ["pocket:wren"], "arithmetic", None, None, None, None)
    with pytest.raises(UserError, match=f"--steps {steps}: give a whole number"):
        start_team(*given, lambda *question: steps, print)


def test_a_person_is_asked(tmp_path: Path) -> None:
    """In a terminal: two models, the data file, the proposed reward, four steps."""
    data = write_rows(tmp_path / "sums.jsonl", SUMS)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hacrl", "init"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment
    )
    os.close(theirs)
    os.write(ours, f"pocket:wren,pocket:heron\n{data.name}\n\n4\n".encode())
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 0, seen
    assert b"Reward: exact, number, choice" in seen
    settings = load_config(tmp_path / "team.toml")
    assert [agent.name for agent in settings.agents] == ["wren", "heron"]
    assert (settings.steps, settings.verifier.kind) == (4, "number")


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (["12", "-3.5", "1,200", "$18"], "number"),
        (["so it is 4\n#### 4", "6 eggs\n#### 6"], "number"),
        (["A", "(b)", "C."], "choice"),
        ([r"\frac{1}{2}", r"$x^2$", "7"], "math"),
        (["Paris", "Rome 2"], "exact"),
    ],
)
def test_the_answers_choose_the_verifier(answers: list[str], kind: str) -> None:
    assert guess_verifier(answers)[0] == kind


def test_columns_with_other_names_are_asked_for(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "e.jsonl", [{"Prompt": "x?", "two": "1", "three": "2"}])
    data = read_data(file, None, None, lambda flag, *_: {"--answer": "two"}[flag])
    assert (data.question, data.answer, data.other_columns) == ("Prompt", "two", ["three"])


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([{"a": "x", "b": "y"}], (), "give --question COLUMN, one of: a, b"),
        ([{"question": "x", "b": 1, "c": 2}], (), "give --answer COLUMN"),
        (
            [{"question": "x", "answer": "1"}],
            ("--answer", "answr"),
            "its columns are: question, answer",
        ),
        ([{"question": "x", "answer": None}], (), "line 1: column 'answer'"),
        ([{"question": "x", "answer": "1"}], ("--reward", "right"), "choose one of exact, number"),
        ([{"question": "x " * 400, "answer": "1"}], (), "reads at most 512"),
        ([{"messages": [], "answer": "1"}], (), "must be a list of messages {role, content}"),
        ([{"messages": [{"role": "user", "content": "1?"}]}], (), "give --answer COLUMN"),
        ([{"question": "x", "answer": "1"}], ("--model", "./no"), "the model folder ./no does not"),
        ([], (), "the file is empty"),
    ],
)
def test_bad_data_is_one_sentence(
    tmp_path: Path, rows: list[dict[str, Any]], flags: tuple[str, ...], message: str
) -> None:
    data = write_rows(tmp_path / "d.jsonl", rows)
    config = tmp_path / "team.toml"
    assert message in refused("init", config, *POCKET, "--data", data, *flags)
    assert not config.exists()


def test_doctor_counts_prompts_that_are_too_long(tmp_path: Path) -> None:
    """A run without a prompt stops after its first evaluation."""
    long = {"problem": "+".join(["11"] * 9), "solution": 99}
    data, config = write_rows(tmp_path / "sums.jsonl", [*SUMS, long]), tmp_path / "team.toml"
    accepted("init", config, *POCKET, "--data", data)
    fractions = ["task.held_out_fraction=0", "evaluation.problems=0"]
    out, _ = accepted("doctor", config, *fractions, "max_prompt_tokens=16")
    assert "; 1 of 37 prompts longer than max_prompt_tokens = 16 (the" in " ".join(out.split())
    code, out, _ = hacrl("doctor", config, *fractions, "max_prompt_tokens=2")
    assert code == 2 and "agent wren: 37 of 37 prompts" in out and "Raise it" in out


def test_doctor_checks_the_context_length(tmp_path: Path) -> None:
    """The pocket models read 512 tokens. Training refuses the same config with the same sentence."""
    config = write(tmp_path / "team.toml", max_prompt_tokens=64, max_response_tokens=600)
    code, out, err = hacrl("doctor", config)
    assert (code, "see agent wren, agent finch above" in err) == (2, True)
    message = (
        "max_prompt_tokens + max_response_tokens = 664, but its model reads at most 512 tokens"
    )
    assert " ".join(out.split()).count(message) == 2
    assert message in refused("train", config, "--run", tmp_path / "run").replace("\n", " ")


def test_missing_flags_are_named_outside_a_terminal(tmp_path: Path) -> None:
    config = tmp_path / "team.toml"
    assert "--model is missing" in refused("init", config)
    assert "--data is missing" in refused("init", config, *POCKET)
    assert "does not exist" in refused("init", config, "--model", "/no", "--data", "arithmetic")
    assert "ends with .toml" in refused("init", tmp_path / "team", *POCKET)


def test_the_schema_accepts_the_configs_and_names_a_typo() -> None:
    out, _ = accepted("schema")
    check = jsonschema.Draft7Validator(json.loads(out))
    paths = [
        p for p in (ROOT / "configs").rglob("*.toml") if p.parent.name not in ("arms", "suites")
    ]
    assert len(paths) > 5
    for path in paths:
        check.validate(tomllib.loads(path.read_text()))
    tree = tomllib.loads((ROOT / "configs" / "pocket.toml").read_text())
    for table, key in (
        (tree, "stepz"),
        (tree["algorithm"], "tis_cap"),
        (tree["agents"][0], "modle"),
    ):
        table[key] = 1
        assert not check.is_valid(tree), key
        del table[key]
    assert check.is_valid(tree)


def test_models_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    """wren-3 would be the name of a third wren, but the second model has it."""
    folders = [tmp_path / "a" / "wren", tmp_path / "b" / "wren-3", tmp_path / "c" / "wren"]
    for folder in folders:
        shutil.copytree(pocket_path("wren"), folder)
    models = [word for folder in folders for word in ("--model", str(folder))]
    accepted(
        "init", tmp_path / "team.toml", *models, "--data", write_rows(tmp_path / "sums.jsonl", SUMS)
    )
    agents = tomllib.loads((tmp_path / "team.toml").read_text())["agents"]
    assert [agent["name"] for agent in agents] == ["wren", "wren-3", "wren-2"]
