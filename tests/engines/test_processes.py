"""Agents in processes of their own, without Ray: errors and signals."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from process_table import running, wait_until
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
    wait_until(lambda: metrics.exists() and b'"train"' in metrics.read_bytes())
    children = [pid for pid in processes_in(tmp_path) if pid != run.pid]
    assert len(children) >= 2
    run.send_signal(number)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert run.wait(timeout=60) == expected[number]
    wait_until(lambda: not processes_in(tmp_path))


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is this folder."""
    found = []
    for pid in running():
        with suppress(OSError):  # it has ended in the meantime
            if Path(f"/proc/{pid}/cwd").readlink() == folder:
                found.append(pid)
    return found
