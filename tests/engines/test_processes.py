"""Agents in processes of their own, without Ray: the same numbers as in one process."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from runtimes import CONFIG, assert_same_run, in_runtime, kill_agents, process_ids
from team import member, team

import hacrl
from hacrl.cluster.processes import ProcessExecutor
from hacrl.errors import UserError
from hacrl.store.rundir import RunDirectory

pytestmark = pytest.mark.engines


def side_by_side(config: dict[str, Any]) -> dict[str, Any]:
    return in_runtime(config, "processes")


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return hacrl.train(CONFIG, tmp_path_factory.mktemp("local") / "run")


def test_the_numbers_and_weights_are_those_of_one_process(
    in_one_process: RunDirectory, tmp_path: Path
) -> None:
    assert_same_run(hacrl.train(side_by_side(CONFIG), tmp_path / "run"), in_one_process)


def test_killed_agents_are_restarted(
    in_one_process: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = kill_agents(monkeypatch, ProcessExecutor, process_ids)
    with pytest.warns(UserWarning, match=r"'finch' was lost in step 2 \(signal SIGKILL\)"):
        run = hacrl.train(side_by_side(CONFIG), tmp_path / "run")
    assert len(killed) == 2
    assert_same_run(run, in_one_process)


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
