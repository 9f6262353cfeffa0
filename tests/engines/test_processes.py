"""Agents in processes of their own, without Ray: errors and signals."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from runtimes import CONFIG, in_runtime
from team import member, team

import hacrl
from hacrl.errors import UserError

pytestmark = pytest.mark.engines


def side_by_side(config: dict[str, Any]) -> dict[str, Any]:
    return in_runtime(config, "processes")


def test_errors_of_an_agent_reach_the_user(tmp_path: Path) -> None:
    broken = team(member("wren"), member("finch", model=str(tmp_path)))
    with pytest.raises(UserError, match=str(tmp_path)):
        hacrl.train(side_by_side(broken), tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_run(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "team.toml").write_text(tomli_w.dumps(side_by_side({**CONFIG, "steps": 500})))
    command = [sys.executable, "-m", "hacrl", "train", "team.toml", "--run", "run"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and b'"train"' in metrics.read_bytes())
    children = [pid for pid in processes_in(tmp_path) if pid != run.pid]
    assert len(children) >= 2
    run.send_signal(number)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert run.wait(timeout=60) == expected[number]
    until(lambda: not processes_in(tmp_path))


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.readlink() == folder:
                found.append(int(entry.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)
