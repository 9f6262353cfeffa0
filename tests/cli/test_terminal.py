"""The progress line, errors as messages, and the command that hints name."""

import errno
import io
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from team import member, team

from hacrl.cli import progress
from hacrl.cli.terminal import errors_as_messages, program
from hacrl.config import parse_config
from hacrl.errors import RunStopped, Terminated, UserError, describe, explain, first_line
from hacrl.store.rundir import RunDirectory

INTERRUPTED = RuntimeError("Error calling __set_name__ on 'Field' instance")
"""What Python makes of Ctrl-C while a class is made."""
INTERRUPTED.__cause__ = KeyboardInterrupt()
CONFIG = team(member("wren"), member("finch", learn=False), steps=30)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the progress line reads."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_progress(clock: list[float]) -> None:
    """A first step of 100 s, then 29 of 2 s. Lines at step 1, every 10 s, and at the last step. The
    first estimate comes with step 2 and ignores the slow first step."""
    screen = io.StringIO()
    with progress.ProgressLine(Console(file=screen, width=200)) as line:
        line.phase("loading")
        line.started(parse_config(CONFIG), RunDirectory(Path("runs/x")), 0)
        for step in range(30):
            line.phase("rollouts")
            clock[0] += 2.0 if step else 100.0
            line.stepped(step, [{"agent": "wren", "reward": 0.25}, {"agent": "b", "reward": None}])
        line.note("[odd] words")
    lines = screen.getvalue().splitlines()
    assert lines[0] == "Training wren, finch with hacpo for 30 steps -> runs/x"
    assert lines[1] == "step 1/30  reward wren 0.25  b -"
    assert lines[2] == "step 6/30  0:00:48 left  reward wren 0.25  b -"
    assert [x.split()[1] for x in lines[2:8]] == [f"{n}/30" for n in (6, 11, 16, 21, 26, 30)]
    assert lines[8:] == ["note: [odd] words"]


def test_progress_in_a_terminal(clock: list[float]) -> None:
    """FIRST_HOUR 7, 21: the line fits, no number is cut, and the seconds of the phase move."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    with progress.ProgressLine(console) as line:
        line.phase("loading")
        line.started(parse_config(CONFIG), RunDirectory(Path("runs/x")), 10)
        line.phase("rollouts")
        line.stepped(10, [{"agent": f"agent-{i}", "reward": 0.25} for i in range(9)])
        line._live.refresh()
        clock[0] += 7.4
        line._live.refresh()
    text = screen.getvalue()
    assert "for steps 11 to 30 -> runs/x" in text
    assert "continues from the checkpoint after step 10" in text
    assert "step 11/30  rollouts  reward agent-0 0.25  +8" in text
    assert "step 11/30  rollouts 7 s  reward agent-0 0.25  +8" in text
    assert "…" not in text


def test_plain_progress_inside_a_long_step(clock: list[float]) -> None:
    """FIRST_HOUR 21: a log shows the phases of a step that takes minutes."""
    screen = io.StringIO()
    with progress.ProgressLine(Console(file=screen, width=200)) as line:
        line.started(parse_config(CONFIG), RunDirectory(Path("runs/x")), 0)
        for phase in ("rollouts", "rollouts", "learning"):
            line.phase(phase)
            clock[0] += 40.0
    assert screen.getvalue().splitlines()[1:] == ["step 0/30  rollouts", "step 0/30  learning"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("place: value. Way out."), 2, "error: place: value. Way out."),
        (RunStopped("stale"), 3, "error: stale"),
        (KeyboardInterrupt(), 130, "stopped"),
        (Terminated(), 143, "stopped"),
        (INTERRUPTED, 130, "stopped"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "the disk is full"),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full"), 2, "free space"),
        (MemoryError("big"), 4, "microbatch_tokens"),
        (RuntimeError("CUDA error: out of memory"), 4, "hacrl doctor CONFIG"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), 4, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4, "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, "out of memory"),
    ],
)
def test_errors_become_a_message_and_a_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    with pytest.raises(typer.Exit) as end, errors_as_messages():
        raise error
    assert end.value.exit_code == code
    assert words in capsys.readouterr().err


def test_a_bug_keeps_its_traceback_and_an_exit_its_code() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_messages():
        raise ZeroDivisionError
    with pytest.raises(typer.Exit) as end, errors_as_messages():
        raise typer.Exit(7)
    assert end.value.exit_code == 7


def test_errors_as_text() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert first_line(ValueError("one\ntwo")) == "one"
    assert describe(KeyError("answer")) == "KeyError: 'answer'"
    assert describe(Broken()) == first_line(Broken()) == "Broken"
    of_actor = RuntimeError("ray::Agent.learn() failed at ...")
    of_actor.cause = ValueError("bad reward")  # type: ignore[attr-defined]
    assert first_line(of_actor) == "ValueError: bad reward"
    outer = RuntimeError("the writer's thread failed")
    outer.__cause__ = OSError(errno.EDQUOT, "over quota")
    assert "the disk is full" in (explain(outer) or "")
    assert explain(RuntimeError("other")) is None
    missing = ModuleNotFoundError("No module named 'torch'", name="torch.nn")
    assert "the package torch is not installed" in (explain(missing) or "")
    assert explain(ModuleNotFoundError(name="hacrl.gone")) is None


def test_hints_name_a_command_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hacrl` if this environment's script is on PATH, else its path; without a script, -m."""
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    script = folder / "hacrl"
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert program() == ".venv/bin/python -m hacrl"
    script.touch(0o755)
    assert program() == ".venv/bin/hacrl"
    monkeypatch.chdir("/usr")
    assert program() == str(script)
    monkeypatch.setenv("PATH", str(folder))
    assert program() == "hacrl"
