"""A run directory has one writer and a layout of this version."""

from pathlib import Path

import pytest

from hacrl.config import parse_config
from hacrl.errors import UserError
from hacrl.store.rows import seal
from hacrl.store.rundir import RunDirectory

CONFIG = {
    "steps": 2,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number"},
    "agents": [{"name": "a", "model": "pocket:wren"}],
}


def test_other_layouts_are_refused_by_name(tmp_path):
    run = RunDirectory.create(tmp_path / "run", parse_config(CONFIG))
    assert RunDirectory.open(run.path).config() == parse_config(CONFIG)
    path = run.path / "environment.json"
    for text in (seal({"layout": 9}), '{"layout": 9}\n'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"layout 9.*reads layout 3"):
            RunDirectory.open(run.path)
    path.write_text('{"layout": 3, "check": "0123456789ab"}\n')
    with pytest.raises(UserError, match=r"environment\.json.*check value.*copy it from a run"):
        RunDirectory.open(run.path)
    path.write_text('{"torch": "2"}\n')  # hacrl 0.1
    with pytest.raises(UserError, match=r"written by hacrl 0\.1\.x.*commit 177e5d4"):
        RunDirectory.open(run.path)


def test_a_directory_in_use_is_not_taken(tmp_path):
    config = parse_config(CONFIG)
    run = RunDirectory.create(tmp_path / "run", config)
    with pytest.raises(UserError, match="holds a run already"):
        RunDirectory.create(run.path, config)
    (run.path / ".tmp-left-behind").write_text("")
    with run.locked():
        assert not (run.path / ".tmp-left-behind").exists()
        with pytest.raises(UserError, match="another process"), run.locked():
            pass


def test_rewinding_keeps_what_was_measured_before(tmp_path):
    run = RunDirectory.create(tmp_path / "run", parse_config(CONFIG))
    for step in range(3):
        run.add_metrics([{"kind": "evaluation", "step": step, "agent": "a", "x": float("nan")}])
        run.add_metrics([{"kind": "train", "step": step, "agent": "a"}])
    run.rewind(1)
    kept = [(row["kind"], row["step"]) for row in run.metric_rows()]
    assert kept == [("evaluation", 0), ("train", 0), ("evaluation", 1)]
    assert run.metric_rows()[0]["x"] is None
    run.rewind(0)
    assert run.metric_rows() == []


def test_a_note_is_kept_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for done, text in ((0, "3 prompts are too long"), (4, "no signal"), (5, "no signal")):
        run.add_note(done, text)
    assert run.notes() == [
        {"step": 0, "text": "3 prompts are too long"},
        {"step": 4, "text": "no signal"},
    ]
