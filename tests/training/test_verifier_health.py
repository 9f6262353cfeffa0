"""Runs whose verifier fails: on everything, on a part, or in its process."""

from pathlib import Path
from typing import Any

import pytest
from team import member, team

import hacrl
from hacrl.errors import RunStopped, exit_code
from hacrl.store.rundir import RunDirectory

NUMBER = "int((re.findall(r'[0-9]+', completion) or [0])[-1])"


def settings(folder: Path, body: str, **options: Any) -> dict[str, Any]:
    """A config of two steps whose reward function has this body."""
    text = f"import os, re, zlib\nleaked = []\ndef score(completion, **columns):\n    {body}\n"
    (folder / "rewards.py").write_text(text)
    verifier = {"kind": "function", "workers": 1, "timeout": 60, **options}
    verifier["options"] = {"path": f"{folder}/rewards:score"}
    return team(member("wren"), steps=2, verifier=verifier)


def test_a_reward_function_that_always_fails_stops_before_anything_is_stored(
    tmp_path: Path,
) -> None:
    """FIRST_HOUR 1 and 2: the evaluation before training is no accuracy; after the function is
    mended the run continues."""
    config = settings(tmp_path, "raise ValueError('boom')")
    with pytest.raises(RunStopped) as stopped:
        hacrl.train(config, tmp_path / "run")
    assert exit_code(stopped.value) == 3
    expected = (
        "wren cannot be evaluated before training: your reward function failed on all 12 replies "
        "(first error: ValueError: boom)"
    )
    assert expected in str(stopped.value)
    assert f"`hacrl resume {tmp_path / 'run'} --accept-changed`" in str(stopped.value)
    run = RunDirectory.open(tmp_path / "run")
    assert run.metric_rows() == [] and not run.evaluation(0, "wren").exists()
    settings(tmp_path, "return 0.5")
    hacrl.resume(tmp_path / "run", accept_changed=True)
    assert run.finished()


def test_a_step_without_a_verdict_stops_before_it_is_journalled(tmp_path: Path) -> None:
    """FAULTS D3: the journal is final, so such a step must not get into it."""
    config = settings(tmp_path, "raise ValueError('boom')")
    with pytest.raises(RunStopped) as stopped:
        hacrl.train({**config, "evaluation": {"problems": 0}}, tmp_path / "run")
    expected = (
        "wren learned nothing in step 1: your reward function failed on all 24 replies (first "
        "error: ValueError: boom)"
    )
    assert expected in str(stopped.value)
    assert list((tmp_path / "run" / "journal").rglob("*.jsonl")) == []
    settings(tmp_path, "return 0.5")
    hacrl.resume(tmp_path / "run", accept_changed=True)


def test_rewards_outside_the_range_are_named(tmp_path: Path) -> None:
    """FIRST_HOUR 1: -1/+1. Half of the replies are not judged; the run says how many and why."""
    body = f"return 1 if {NUMBER} % 2 else -1"
    begin = "wren, evaluation before training: your reward function failed on"
    with pytest.warns(UserWarning, match=begin):
        run = hacrl.train(settings(tmp_path, body), tmp_path / "run")
    first = run.notes()[0]["text"]
    assert first.startswith(begin) and "(r + 1) / 2" in first
    assert "first error: reward -1 is outside verifier.options.reward_range = [0, 1]" in first
    assert len(run.notes()) <= 2
    row = run.metric_rows("evaluation", "wren")[0]
    assert 0 < row["verdict/error"] < 12 and row["verdict/first_failure"].startswith("error: ")


def test_a_leaking_reward_function_changes_no_number(tmp_path: Path) -> None:
    """FAULTS D3: 10 MB a call, in a worker with 0.2 GB, against the same function without the leak."""
    leak = "leaked.append(bytearray(10 << 20)); "
    reward = f"return {NUMBER} % 3 / 2"
    rows = [
        hacrl.train(settings(tmp_path, body, memory_gb=0.2), tmp_path / name).metric_rows()
        for name, body in (("sound", reward), ("leaks", leak + reward))
    ]
    assert rows[0] == rows[1]
    assert all(row["verdict/error"] == 0 for row in rows[0])
