"""Ctrl-C and SIGTERM: a flag that ordinary code reads, and the previous handlers afterwards."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from team import member, team

import hacrl
from hacrl.algorithms.gspo import Gspo
from hacrl.config import AgentConfig
from hacrl.errors import Terminated, exit_code
from hacrl.logs.observer import Observer
from hacrl.policy.gradients import idle_sample
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.stopping import check, stoppable
from hacrl.store.rundir import RunDirectory
from hacrl.types import Message, Problem, Update
from hacrl.verify import VerifierPool
from hacrl.verify.settings import VerifierConfig

STOPS = (KeyboardInterrupt, Terminated)
QUICK = {"evaluation": {"problems": 0}, "checkpoint": {"every": 0}, "steps": 2}


class InFinaliser:
    """Sends Ctrl-C to this process while it is finalised."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class StopAfterOneStep(Observer):
    def stepped(self, step: int, rows: Any) -> None:
        if step == 0:  # a second signal would end the test process
            InFinaliser()


def test_ctrl_c_in_a_finaliser_stops_the_run(tmp_path: Path) -> None:
    """Python discards an exception there, so a handler that raises would be lost (FIRST_HOUR 8)."""
    config = team(member("wren"), **{**QUICK, "steps": 50})
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        hacrl.train(config, tmp_path / "run", observer=StopAfterOneStep())
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    run = hacrl.resume(tmp_path / "run", steps=2)
    assert [row["step"] for row in run.metric_rows("train")] == [0, 1]


def signalled(number: int, work: Callable[[], Any]) -> None:
    """Work after a signal has arrived."""
    with stoppable():
        signal.raise_signal(number)
        work()
        pytest.fail("went on after the signal")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_check(number: int) -> None:
    with pytest.raises(STOPS) as stopped, stoppable():
        signalled(number, check)
    assert exit_code(stopped.value) == 128 + number
    with pytest.raises(STOPS), stoppable():
        signal.raise_signal(number)  # no check follows: stops at the end of the block
    check()


@pytest.mark.parametrize("place", range(1, 8))
def test_a_signal_while_a_block_ends_is_not_lost(place: int) -> None:
    """The signal comes before the n-th line that `stoppable` executes after the block."""
    lines, ended = 0, False

    def trace(frame: Any, event: str, value: Any) -> Any:
        nonlocal lines
        if event == "line" and ended and frame.f_code.co_name == "stoppable":
            lines += 1
            if lines == place:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.getsignal(signal.SIGTERM)
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt), stoppable():
            ended = True
    finally:
        sys.settrace(before)
    assert signal.getsignal(signal.SIGTERM) == handler
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) != handler  # the next block has its own again


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


SWALLOWS = """
import signal
from hacrl.stopping import remember_ctrl_c, stoppable
remember_ctrl_c()
try:
    signal.raise_signal(signal.SIGINT)
except:
    print("discarded", flush=True)
with stoppable():
    print("went on")
"""


def test_ctrl_c_that_an_import_discards_stops_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "discarded\n"), done.stderr


def test_ctrl_c_during_an_import_ends_the_command(tmp_path: Path) -> None:
    """No traceback, and no abort in C++ code that the exception would pass through."""
    (tmp_path / "slow.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept:\n    print('on')\n"
    )
    code = "from hacrl.stopping import *; remember_ctrl_c(); import slow; print('on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


HANGS = """
import time
from hacrl.stopping import stoppable
with stoppable():
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(number: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.5)
    child.send_signal(number)
    assert child.wait(timeout=30) == -number


@pytest.mark.parametrize("where", ["sampling", "scoring", "updates", "verifier", "inline verifier"])
def test_work_in_progress_is_stopped(where: str) -> None:
    agent = AgentConfig(name="wren", model="pocket:wren")
    policy = Policy(agent, device="cpu", temperature=1.0, beta=0.0)
    sample = replace(idle_sample(0), advantage=1.0)
    reply = ("it is 42", Problem("p", (Message("user", "?"),), "42", "test"))
    workers = 0 if where == "inline verifier" else 1
    with VerifierPool(VerifierConfig(kind="number", workers=workers)) as verifier:
        work: dict[str, Callable[[], Any]] = {
            "sampling": lambda: policy.sampler.sample([Request((5, 6), 7, 20)], 1.0),
            "scoring": lambda: policy.score([((5, 6), (7, 8))]),
            "updates": lambda: policy.update(
                [sample], Gspo.loss, Update(index=0, floor=0.8, part="own", problems=())
            ),
            "verifier": lambda: verifier.judge_all([reply]),
            "inline verifier": lambda: verifier.judge_all([reply]),
        }
        with pytest.raises(STOPS):
            signalled(signal.SIGTERM, work[where])


# ---------------------------------------------------------------- the library call


def test_ctrl_c_inside_an_event_loop(tmp_path: Path) -> None:
    """As in a notebook, whose thread runs an event loop."""

    async def cell() -> None:
        config = team(member("wren"), **{**QUICK, "steps": 50})
        hacrl.train(config, tmp_path / "run", observer=StopAfterOneStep())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    done = RunDirectory.open(tmp_path / "run").steps_done()
    assert 0 < done < 50
    assert hacrl.resume(tmp_path / "run", steps=done + 1).steps_done() == done + 1


def test_train_in_another_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(hacrl.train, team(member("wren"), **QUICK), tmp_path / "run")
        assert work.result().steps_done() == 2


def test_the_library_call_shows_progress_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere it prints nothing (FIRST_HOUR 10)."""
    config = team(member("wren"), **QUICK)
    hacrl.train(config, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    hacrl.train(config, tmp_path / "shown")
    err = capsys.readouterr().err
    assert "Training wren with hacpo for 2 steps" in err
    assert "step 2/2" in err
