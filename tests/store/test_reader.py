"""The reader of run directories on hand-written files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hacrl.config import dump_config, parse_config
from hacrl.errors import UserError
from hacrl.store.reader import RunReader, read_rows, read_scores
from hacrl.store.rundir import RunDirectory


def write_lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(path: Path, problems: int = 4) -> RunDirectory:
    config = parse_config(
        {
            "steps": 2,
            "task": {"kind": "arithmetic"},
            "verifier": {"kind": "number"},
            "evaluation": {"problems": problems},
            "agents": [
                {"name": "a", "model": "pocket:wren"},
                {"name": "frozen", "model": "pocket:finch", "learn": False},
            ],
        }
    )
    path.mkdir()
    (path / "config.toml").write_text(dump_config(config))
    return RunDirectory(path)


def test_a_row_measured_twice_counts_once(tmp_path: Path) -> None:
    """Metrics: the last row. Times: the longest of each phase, since a resumed step takes its
    rollouts from the journal."""
    run = make_run(tmp_path / "run")
    base = {"kind": "train", "agent": "a"}
    write_lines(
        run.metrics_path,
        {**base, "step": 0, "reward": 0.1},
        {**base, "step": 1, "reward": 0.2},
        {**base, "step": 1, "reward": 0.3},
        {**base, "kind": "evaluation", "step": 1, "reward": 0.9},
    )
    write_lines(
        run.path / "times.jsonl",
        {"step": 0, "agent": "a", "sample": 1.0, "update": 2.0},
        {"step": 1, "agent": "a", "sample": 4.0, "update": 2.0, "checkpoint": 50.0},
        {"step": 1, "agent": "a", "sample": 0.5, "update": 3.0, "diagnostics": 8.0},
        {"step": 1, "agent": "", "evaluate": 100.0},
    )
    assert [row["reward"] for row in run.metrics("train", "a")] == [0.1, 0.3]
    assert len(run.metrics()) == 3 and run.metrics("train", "frozen") == []
    assert run.training_seconds() == {0: 3.0, 1: 7.0}
    assert (run.seconds("a"), run.seconds("a", diagnostics=True)) == (10.0, 8.0)
    assert run.steps_done() == 2


def test_state(tmp_path: Path) -> None:
    """A run is finished with the last evaluation of its learners; without evaluations, with their
    last training row."""
    run = make_run(tmp_path / "run")
    assert (run.steps_done(), run.finished(), run.running()) == (0, False, False)
    train = [{"kind": "train", "step": i, "agent": "a"} for i in range(2)]
    write_lines(run.metrics_path, *train)
    assert not run.finished()
    write_lines(run.metrics_path, *train, {"kind": "evaluation", "step": 2, "agent": "a"})
    assert run.finished()
    with run.locked():
        assert RunReader(run.path).running()
    assert not run.running()
    without = make_run(tmp_path / "without", problems=0)
    write_lines(without.metrics_path, *train)
    assert without.finished()


def test_scores_are_recounted_from_replies(tmp_path: Path) -> None:
    """p: the mean of 1 and 0; q: its unjudged reply is left out; r: nothing judged."""
    rewards = [("p", 1.0), ("p", 0.0), ("q", None), ("q", 1.0), ("r", None)]
    rows = [{"problem": p, "reward": reward} for p, reward in rewards]
    write_lines(tmp_path / "replies.jsonl", *rows)
    assert read_scores(tmp_path) == {"p": 0.5, "q": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "p"}\n{"problem"', "line 2: the file is truncated"),
        ('{"problem": "p"}\n{"probl\n', "line 2: not JSON"),
        ('{"problem": "p"}\n[1]\n', "line 2: not a JSON object"),
        ('{"question": "p"}\n', "line 1: no 'problem'"),
        ("\x00\udcff\n", "line 1: not UTF-8"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=f"rows.jsonl, {message}"):
        read_rows(path, ["problem"])


def test_an_unfinished_last_line_of_a_growing_file_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_rows(path, appended=True) == [{"step": 1}]
    assert read_rows(tmp_path / "missing.jsonl") == []


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory: it has no"):
        RunReader.open(tmp_path)
