"""A team of one on own data, with its own model folder, reward function and task: files that change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from team import team

import hacrl
from hacrl.pocket import pocket_path
from hacrl.store.rundir import RunDirectory

REWARD = """from helpers import contains
def score(completion, answer):
    return 1.0 if contains(completion, answer) else 0.0
"""
HELPERS = "from parts.text import within as contains\n"
WITHIN = "def within(text, part):\n    return part in text\n"
OWN_TASK = """
from pathlib import Path
from hacrl.tasks.arithmetic import ArithmeticTask
def make(config, seed, base):
    return ArithmeticTask(seed, tuple(Path(__file__).with_name("kinds.txt").read_text().split()))
"""


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


def own_run(folder: Path) -> RunDirectory:
    """Two steps of it."""
    with pytest.warns(
        UserWarning, match=r"evaluation\.problems = 12, but the task has \d held-out"
    ):
        return hacrl.train(own_config(folder), folder / "run")


def history(run: RunDirectory) -> list[dict[str, Any]]:
    return run.fingerprint()["history"]
