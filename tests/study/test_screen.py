"""Curves, and small parts of doctor, samples and the W&B logger."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from team import member, team

from hacrl.algorithms import Needs
from hacrl.cli.progress import ProgressLine
from hacrl.config import parse_config
from hacrl.store.rundir import RunDirectory
from hacrl.study.doctor import doctor
from hacrl.study.doctor.doctor import plan_texts
from hacrl.study.doctor.memory import size_text
from hacrl.study.evaluation import evaluation_table
from hacrl.study.inspect.samples import one_line
from hacrl.study.inspect.summary import RunSummary
from hacrl.study.plots import sparkline
from hacrl.study.tables import summary_table
from hacrl.training.plan import make_plan

CONFIG = team(member("wren"), member("finch", learn=False), steps=30)


def test_sparklines() -> None:
    """Lowest to highest; a flat line; more values than columns are averaged."""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([0, 0, 4, 4, 8], width=3) == "▁▄█"


def test_plan_in_words() -> None:
    """128 prompts x 8, one peer, minibatches of 512: two and two, the peers' floors .85 and .875."""
    plan = make_plan(
        learner="a",
        prompts=128,
        samples_per_prompt={"a": 8, "b": 8},
        minibatch_samples=512,
        needs=Needs("logprob"),
        floor=0.8,
        last_floor=0.875,
    )
    assert plan_texts(plan) == ["2 own + 2 peers", "0.85 to 0.875"]
    assert plan_texts(None) == ["none (frozen)", "-"]


def test_sizes_in_words() -> None:
    assert [size_text(s) for s in (5.4e5, 2.1e7, 1.64e9)] == ["0.5 MB", "21 MB", "1.6 GB"]


def test_model_text_stays_on_its_line() -> None:
    assert one_line("a\nb\r\nc") == "a ⏎ b ⏎ c"


def test_doctor_checks_the_extras_of_runtime_and_sampler(monkeypatch) -> None:
    """A missing extra is reported with the command that installs it."""
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    asked = {"runtime": {"kind": "ray"}, "sampler": {"kind": "vllm"}}
    found = {f.detail for f in doctor.check(parse_config({**CONFIG, **asked})) if not f.good}
    assert {"needs pip install 'hacrl[ray]'", "needs pip install 'hacrl[vllm]'"} <= found
    found = {f.detail for f in doctor.check(parse_config(CONFIG))}
    assert not any("ray" in detail or "vllm" in detail for detail in found)


@pytest.mark.parametrize(
    ("kind", "name"), [("number", "accuracy in"), ("function", "reward x 100")]
)
def test_partial_rewards_are_not_called_accuracy(kind: str, name: str) -> None:
    """In the table of `show` and `eval`, and on the progress line."""
    options = {"path": "rewards:score"} if kind == "function" else {}
    config = parse_config(team(member("wren"), verifier={"kind": kind, "options": options}))
    row = {"agent": "wren", "accuracy": 0.5, "accuracy/low": 0.4, "accuracy/high": 0.6}
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, width=200))
    line.started(config, RunDirectory(Path("run")), 0)
    line.evaluated(0, [row])
    assert name.removesuffix(" in") in stream.getvalue()
    assert ("50.0±10.0 %" in stream.getvalue()) is (kind == "number")
    summary = RunSummary(Path("run"), config, 1, "stopped", (), None)
    assert name in str(summary_table(summary).caption)
    assert name in str(evaluation_table([], kind).title)
