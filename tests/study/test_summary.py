"""What commands print: tables from hand-written run directories, curves, texts of doctor and samples."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from team import member, team

from hacrl.cli.progress import ProgressLine
from hacrl.config import parse_config
from hacrl.statistics import Estimate
from hacrl.store.reader import LAYOUT
from hacrl.store.rows import write_object, write_rows
from hacrl.store.rundir import RunDirectory
from hacrl.study.doctor import doctor
from hacrl.study.doctor.memory import size_text
from hacrl.study.evaluation import evaluation_table
from hacrl.study.inspect.samples import one_line
from hacrl.study.inspect.summary import RunSummary, summarise
from hacrl.study.plots import sparkline
from hacrl.study.tables import (
    duration,
    notes_text,
    percent,
    plain_table,
    points_text,
    summary_table,
)


def write_run(
    path: Path, rewards: list[float], scores: dict[int, list[float]], **settings: Any
) -> RunDirectory:
    """A run of one agent "a": its rewards by step, its scores by evaluation step and problem."""
    path.mkdir()
    write_object(path / "environment.json", {"layout": LAYOUT})
    run = RunDirectory(path)
    run.set_config(parse_config(team(member("a", "wren"), steps=len(rewards), **settings)))
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": i, "agent": "a", "reward": reward, "rollouts": 8, "updates": 3}
        | {"peers/forwarded": 10 * (i + 1), "peers/used": 0.2 if i else 0.5}
        for i, reward in enumerate(rewards)
    ]
    for step, values in scores.items():
        mean = sum(values) / len(values)
        rows.append(
            {"kind": "evaluation", "step": step, "agent": "a", "accuracy": mean}
            | {"accuracy/low": mean - 0.1, "accuracy/high": mean + 0.1}
        )
        lines = [{"problem": f"p{i}", "reward": value} for i, value in enumerate(values)]
        write_rows(run.evaluation(step, "a") / "replies.jsonl", lines)
    run.add_metrics(rows)
    for step in range(len(rewards)):
        run.add_times({"step": step, "agent": "a", "sample": 1.0, "update": 0.5})
        run.add_times({"step": step, "agent": "", "evaluate": 0.25})
    return run


def test_summary_by_hand(tmp_path: Path) -> None:
    """Four steps: the edges are means over 4 // 2 = 2 steps, (.1 + .2) / 2 and (.4 + .8) / 2.
    Peers: 10 samples at 0.5 and 20 + 30 + 40 at 0.2: (5 + 18) / 100. The best evaluation is the
    start, which comes before an equal one."""
    scores = {0: [0.0, 1.0, 1.0, 1.0], 2: [1.0, 1.0, 1.0, 0.0], 4: [0.0, 1.0, 0.0, 1.0]}
    summary = summarise(write_run(tmp_path / "run", [0.1, 0.2, 0.4, 0.8], scores))
    (agent,) = summary.agents
    assert summary.steps_done == 4
    assert agent.reward_edges == pytest.approx((0.15, 0.6))
    assert agent.peers_used == pytest.approx(0.23)
    assert (agent.rollouts, agent.updates, agent.seconds) == (32, 12, 6.0)
    assert agent.before.accuracy.mean == 0.75
    assert (agent.after.step, agent.after.accuracy.mean) == (4, 0.5)
    assert (agent.best.step, agent.best.accuracy.mean) == (0, 0.75)
    assert agent.gain.mean == pytest.approx(-0.25)  # of four problems one got lost
    assert agent.gain.count == 4
    assert "reward: mean of the first and last 2 steps" in str(summary_table(summary).caption)
    (agent,) = summarise(write_run(tmp_path / "begun", [0.5], {0: [0.0, 1.0]})).agents
    assert agent.after is None and agent.gain is None
    assert agent.best is not None and agent.best.step == 0


def test_prompts_of_dynamic_sampling_are_those_of_its_lists(tmp_path: Path) -> None:
    """Prompts that are too long are counted among 2 lists of 3 x 6 problems."""
    algorithm = {"name": "gspo-dynamic", "list_factor": 3}
    run = write_run(tmp_path / "run", [0.5, 0.5], {}, algorithm=algorithm, prompts_per_step=6)
    (agent,) = summarise(run).agents
    assert agent.prompts == 36


def printed(table: Table, width: int) -> str:
    console = Console(width=width, highlight=False, file=io.StringIO(), record=True)
    console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    return text


def test_narrow_terminals_cut_no_number(tmp_path: Path) -> None:
    """Whatever the width, every number of the table is printed whole. FIRST_HOUR 7: also beside names of
    64 letters, where every block names its rows."""
    run = write_run(tmp_path / "run", [0.1, 0.2], {0: [0.0, 1.0], 2: [1.0, 1.0]})
    shown = summary_table(summarise(run))
    numbers = [str(cell) for column in shown.columns for cell in column.cells]
    table = plain_table("t", ["agent", "arm"], ["before", "after", "difference"])
    table.add_row("a" * 64, "hacpo", "12.34", "56.78", "+44.4 [+33.3, +55.5]")
    table.add_row("b", "gspo", "11.11", "22.22", "-")
    for width in (40, 60, 80, 100, 200):
        assert all(number in printed(shown, width) for number in numbers)
        text = printed(table, width)
        assert all(n in text for n in ("12.34", "56.78", "+44.4 [+33.3, +55.5]"))
        assert text.count("gspo") == text.count("agent") and text.count("a" * 5) >= 2


def test_show_prints_the_last_notes(tmp_path: Path) -> None:
    """Notes may quote a peer's text: markup stays text, control characters are removed."""
    run = write_run(tmp_path / "run", [0.5], {})
    assert str(notes_text(summarise(run))) == ""
    run.add_note(0, "a [red]first[/] note\x1b[31m")
    assert "notes:\n- at the start: a [red]first[/] note [31m" in str(notes_text(summarise(run)))
    for i in range(10):
        run.add_note(1, f"note {i}")
    text = str(notes_text(summarise(run)))
    assert "first" not in text and "- after step 1: note 9" in text
    assert text.startswith("notes (the last 10 of 11; ") and "notes.jsonl has all" in text


def test_numbers_in_words() -> None:
    assert percent(Estimate(0.61, 0.572, 0.648, 300)) == "61.0±3.8"
    assert percent(Estimate(0.61, 0.55, 0.641, 30, "bootstrap")) == "61.0 [55.0, 64.1]"
    assert percent(Estimate(0.0, 0.0, 0.037, 100)) == "0.0 [0.0, 3.7]"
    assert points_text(Estimate(-0.02, -0.05, 0.01, 300)) == "-2.0±3.0"
    assert points_text(None) == "-"
    assert [duration(s) for s in (8.26, 125, 3725)] == ["8.3 s", "2:05", "1:02:05"]
    assert [size_text(s) for s in (5.4e5, 2.1e7, 1.64e9)] == ["0.5 MB", "21 MB", "1.6 GB"]
    assert one_line("a\nb\r\nc") == "a ⏎ b ⏎ c"
    assert [sparkline(v) for v in ([0.0, 0.5, 1.0], [0.5, 0.5])] == ["▁▄█", "▁▁"]
    assert sparkline([0, 0, 4, 4, 8], width=3) == "▁▄█"  # more values than columns are averaged


CONFIG = team(member("wren"), member("finch", learn=False), steps=30)


def test_doctor_names_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    asked = {"runtime": {"kind": "ray"}, "sampler": {"kind": "vllm"}}
    for config, detail in (
        (CONFIG | asked, "pip install 'hacrl[vllm,ray]'"),
        (CONFIG, "none needed"),
    ):
        assert detail in [found.detail for found in doctor.check(parse_config(config))]


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
    summary = RunSummary(Path("run"), config, 1, "stopped", ())
    assert name in str(summary_table(summary).caption)
    assert name in str(evaluation_table([], kind).title)
