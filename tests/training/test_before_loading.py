"""What `train` checks and writes before it loads a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from own_files import OWN_TASK, own_config
from team import member, team

import hacrl
from hacrl.errors import UserError
from hacrl.store.rundir import RunDirectory


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
