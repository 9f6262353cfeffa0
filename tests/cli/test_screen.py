"""Progress, curves, failures and doctor's small parts."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from hacrl import progress
from hacrl.config import parse_config
from hacrl.errors import RunStopped, UserError
from hacrl.failures import calm, explain
from hacrl.pocket import pocket_path
from hacrl.store.rundir import RunDirectory, first_difference
from hacrl.study.doctor import doctor
from hacrl.study.doctor.doctor import plan_cells
from hacrl.study.doctor.memory import count_parameters, size_text
from hacrl.study.inspect.curves import plot, smooth
from hacrl.study.inspect.samples import one_line
from hacrl.training.loggers import WeightsAndBiases
from hacrl.training.plan import make_plan

CONFIG = {
    "steps": 30,
    "prompts_per_step": 64,
    "max_prompt_tokens": 10,
    "max_response_tokens": 20,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number"},
    "agents": [
        {"name": "wren", "model": "pocket:wren"},
        {"name": "finch", "model": "pocket:finch", "learn": False},
    ],
}


def test_plain_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty steps of one second: lines at steps 1, 11, 21 and, being the last, 30."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    screen = io.StringIO()
    with progress.ProgressLine(Console(file=screen, width=200)) as line:
        line.phase("loading")
        line.started(parse_config(CONFIG), RunDirectory(Path("runs/x")), 0)
        for step in range(30):
            line.phase("rollouts")
            clock[0] += 1.0
            line.stepped(step, [{"agent": "wren", "reward": 0.25}, {"agent": "b", "reward": None}])
        line.note("[odd] words")
    lines = screen.getvalue().splitlines()
    assert lines[0] == "hacpo, wren, finch: steps 0 to 30 in runs/x"
    assert [x.split()[1] for x in lines[1:5]] == ["1/30", "11/30", "21/30", "30/30"]
    assert lines[1] == "step 1/30  reward wren 0.25  b -  0:00:29 left"
    assert lines[5] == "note: [odd] words"
    assert len(lines) == 6


def test_progress_in_a_terminal_is_one_line_that_goes_away() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with progress.ProgressLine(console, beside=lambda: "alone: step 2") as line:
        line.phase("loading")
        line.started(parse_config(CONFIG), RunDirectory(Path("runs/x")), 10)
        line.stepped(10, [{"agent": "wren", "reward": 0.25}])
        line._bar.refresh()
    text = screen.getvalue()
    assert "step 11/30" in text
    assert "wren 0.25" in text
    assert "alone: step 2" in text


def test_plot_of_a_rising_line() -> None:
    """From the lower left corner to the upper right one: the first drawn character of the lowest row
    is at the left, the last of the highest row at the right; rows between rise."""
    lines = plot({"a": [(0, 0.0), (100, 1.0)]}, width=47, height=4).plain.splitlines()
    first = [len(line) - len(line[6:].lstrip()) for line in lines[:4]]
    assert first == sorted(first, reverse=True)
    assert lines[3][6] != " "
    assert lines[0].rstrip()[-1] != " "
    assert len(lines[0].rstrip()) == 46
    assert lines[0].startswith(" 1.05")
    assert lines[3].startswith(" 0.00")
    assert lines[4].split() == ["0", "step", "100"]
    assert "a" in lines[5]


def test_plot_of_one_point_and_of_a_flat_line() -> None:
    for curve in ([(3, 0.5)], [(0, 0.5), (9, 0.5)], [(0, -1.0), (1, -1.0)]):
        assert plot({"a": curve, "empty": []}).plain.count("\n") == 10


def test_smooth_leaves_short_curves_and_averages_long_ones() -> None:
    short = [(i, float(i)) for i in range(19)]
    assert smooth(short) == short
    long = smooth([(i, float(i)) for i in range(20)])
    assert long[0] == (0, 0.0)
    assert long[3] == (3, 1.5)
    assert long[19] == (19, 17.0)  # mean of 15 .. 19


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("place: value. Way out."), 2, "error: place: value. Way out."),
        (RunStopped("stale"), 3, "error: stale"),
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "no room left on the disk"),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full"), 2, "free space"),
        (MemoryError("big"), 4, "microbatch_tokens"),
        (RuntimeError("CUDA error: out of memory"), 4, "hacrl doctor CONFIG"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), 4, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4, "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, "out of memory"),
    ],
)
def test_failures_are_calm(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    with pytest.raises(typer.Exit) as end, calm():
        raise error
    assert end.value.exit_code == code
    assert words in capsys.readouterr().err


def test_a_bug_keeps_its_traceback_and_an_exit_its_code() -> None:
    with pytest.raises(ZeroDivisionError), calm():
        raise ZeroDivisionError
    with pytest.raises(typer.Exit) as end, calm():
        raise typer.Exit(7)
    assert end.value.exit_code == 7


def test_a_wrapped_full_disk_is_found() -> None:
    outer = RuntimeError("the writer's thread failed")
    outer.__cause__ = OSError(errno.EDQUOT, "over quota")
    assert "no room left" in (explain(outer) or "")
    assert explain(RuntimeError("other")) is None


def test_plan_in_words() -> None:
    """128 prompts x 8, one peer, minibatches of 512: two and two, the peers' floors .85 and .875."""
    plan = make_plan(
        learner="a",
        prompts=128,
        samples_per_prompt={"a": 8, "b": 8},
        minibatch_samples=512,
        order="own_first",
        shares=True,
        floor=0.8,
        last_floor=0.875,
    )
    assert plan_cells(plan) == ["2 own + 2 peers", "0.85 to 0.875"]
    assert plan_cells(None) == ["none (frozen)", "-"]


def test_parameters_of_a_folder() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pocket_path("wren"))
    assert count_parameters(pocket_path("wren")) == sum(p.numel() for p in model.parameters())
    assert [size_text(s) for s in (5.4e5, 2.1e7, 1.64e9)] == ["0.5 MB", "21 MB", "1.6 GB"]


def test_model_text_stays_on_its_line() -> None:
    assert one_line("a\nb\r\nc") == "a ⏎ b ⏎ c"


def test_a_password_does_not_leave_for_weights_and_biases(tmp_path: Path, monkeypatch) -> None:
    sent: dict = {}
    wandb = SimpleNamespace(init=lambda **settings: sent.update(settings))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    pool = {"url": "postgresql://me:s3cret@db/pool"}
    config = parse_config({**CONFIG, "pool": pool, "log": {"wandb": "team"}})
    WeightsAndBiases(RunDirectory(tmp_path), config)
    assert sent["config"]["pool"]["url"] == "postgresql://me:***@db/pool"
    changed = parse_config({**CONFIG, "pool": {"url": "sqlite:///pool.db"}})
    told = first_difference(config.model_dump(), changed.model_dump())
    assert told is not None and "s3cret" not in told


def test_doctor_knows_what_a_runtime_and_a_sampler_need(monkeypatch) -> None:
    """An extra that is not there is told with the way to get it."""
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    asked = {"runtime": {"kind": "ray"}, "sampler": {"kind": "vllm"}}
    found = {f.detail for f in doctor.check(parse_config({**CONFIG, **asked})) if not f.good}
    assert {"needs pip install 'hacrl[ray]'", "needs pip install 'hacrl[vllm]'"} <= found
    found = {f.detail for f in doctor.check(parse_config(CONFIG))}
    assert not any("ray" in detail or "vllm" in detail for detail in found)
