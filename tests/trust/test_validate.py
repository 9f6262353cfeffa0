"""Batches with impossible values: the rows are left out and counted, the rest is used."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from team import member, team
from typer.testing import CliRunner

import hacrl
from hacrl.cli import app
from hacrl.errors import UserError
from hacrl.store import pool as pool_module
from hacrl.store.rundir import RunDirectory
from hacrl.training import replay as replay_module

Rows = list[dict[str, Any]]
Change = Callable[[Rows], list[str]]
"""From the rows of a batch to the lines that are published instead."""

SETTINGS: dict[str, Any] = {"steps": 2, "evaluation": {"problems": 0}, "checkpoint": {"every": 1}}


def dumped(rows: Rows) -> list[str]:
    return [json.dumps(row) for row in rows]


def train(
    path: Path, monkeypatch: pytest.MonkeyPatch, agents: list[dict], change: Change, **settings: Any
) -> tuple[RunDirectory, list[str]]:
    """A run in which "finch" publishes what `change` makes of its rows, and the notes it showed."""
    encode = pool_module._encode

    def changed(step: int, agent: str, trajectories: Any) -> bytes:
        lines = encode(step, agent, trajectories)
        if agent == "finch":
            lines = "".join(
                line + "\n" for line in change(list(map(json.loads, lines.splitlines())))
            ).encode()
        return lines

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        patch.setattr(pool_module, "_encode", changed)
        run = hacrl.train(team(*agents, **{**SETTINGS, **settings}), path)
    return run, [str(w.message) for w in shown]


def put(value: Any, *keys: str) -> Callable[[dict[str, Any]], str]:
    """Set a field, given by its path."""

    def change(row: dict[str, Any]) -> str:
        inner = row
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return json.dumps(row)

    return change


BAD: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("unreadable", lambda row: json.dumps(row)[:-20]),
    ("unreadable", put("1.0", "verdict", "reward")),
    ("unreadable", put(10**400, "verdict", "reward")),
    ("unreadable", put(float("inf"), "mean_logprob")),
    ("unreadable", put(-1, "index")),
    ("unreadable", put(7, "step")),
    ("unreadable", put("wren", "agent")),
    ("problem", put("no-such-problem", "problem_id")),
    ("problem", put("another task", "task")),
    ("index", put(99, "index")),
    ("reward", put(1e308, "verdict", "reward")),
    ("reward", put(-1e308, "verdict", "reward")),
    ("reward", put(1e9, "verdict", "reward")),
    ("reward", put(-1.0, "verdict", "reward")),
    ("logprob", put(-1000.0, "mean_logprob")),
    ("logprob", put(5.0, "mean_logprob")),
    ("length", put(0, "num_tokens")),
    ("length", put(10**6, "num_tokens")),
    ("verifier", put("lenient/9", "verifier")),
    ("temperature", put(0.5, "sampling", "temperature")),
    ("verdict", put("not_attempted", "finish")),
    ("turns", put([{"role": "assistant", "text": "7", "generated": True}] * 2, "turns")),
    (
        "length",
        put(
            [{"role": "assistant", "text": t, "generated": t == "7"} for t in ("7 " * 600, "7")],
            "turns",
        ),
    ),
]
"""FAULTS D1, D5, D6: kind of fault, and a change of one row."""


def hostile(rows: Rows) -> list[str]:
    """Every row but the last is bad; that one is published twice."""
    bad = [change(row) for (_, change), row in zip(BAD, rows, strict=False)]
    return [*bad, *dumped(rows[len(BAD) :]), json.dumps(rows[-1])]


def learned(run: RunDirectory) -> list[dict[str, Any]]:
    """All metrics but the counts of dropped rows."""
    drops = ("samples/drop", "samples/invalid")
    return [{k: v for k, v in row.items() if not k.startswith(drops)} for row in run.metric_rows()]


def weights(run: RunDirectory) -> list[bytes]:
    return [p.read_bytes() for p in sorted(run.path.glob("checkpoints/*/*/model.safetensors"))]


def test_d1_d5_d6_bad_rows_are_left_out_and_the_rest_of_the_batch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run with 23 bad rows and one repeated row a step learns exactly what a run learns in which
    they were never published. The note comes once, also after a resume."""
    agents = [member("wren"), member("finch")]
    bad, notes = train(tmp_path / "bad", monkeypatch, agents, hostile)
    clean, _ = train(tmp_path / "clean", monkeypatch, agents, lambda rows: dumped(rows[len(BAD) :]))
    assert learned(bad) == learned(clean)
    assert weights(bad) == weights(clean) and len(weights(bad)) == 4
    for row in bad.metric_rows("train", "wren"):
        assert row["samples/drop/invalid"] == row["samples/dropped/finch"] == len(BAD) + 1
        for kind in {kind for kind, _ in BAD}:
            count = sum(kind == other for other, _ in BAD) + (kind == "index")
            assert row[f"samples/invalid/{kind}"] == count
    (note,) = [text for text in notes if "invalid rows" in text]
    assert note.startswith(
        "agent 'finch' published invalid rows: 24 in step 1. The first: line 1: "
    )
    for path in bad.path.glob("samples/*/*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    for name in ("show", "samples"):
        assert CliRunner().invoke(app, [name, str(bad.path)]).exit_code == 0
    shutil.rmtree(bad.path / "checkpoints")
    before = bad.metric_rows()
    with monkeypatch.context() as patch:  # finch's process publishes its batch again
        patch.setattr(pool_module.Pool, "publish", lambda *args: "")
        hacrl.resume(bad.path)
    assert bad.metric_rows() == before
    assert sum("invalid rows" in row["text"] for row in bad.notes()) == 1


def ids(row: dict[str, Any], change: Callable[[list[int]], list[int]]) -> str:
    row["tokens"]["ids"] = change(row["tokens"]["ids"])
    return json.dumps(row)


def logprob(value: float) -> Callable[[dict[str, Any]], str]:
    def change(row: dict[str, Any]) -> str:
        row["tokens"]["logprobs"][0] = value
        count = len(row["tokens"]["logprobs"])
        row["mean_logprob"] = sum(row["tokens"]["logprobs"]) / count
        return json.dumps(row)

    return change


def test_d9_ids_that_are_not_the_judged_text_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """f-tis trains on a peer's ids: other tokens, a control token inside the reply, ids outside the
    vocabulary, an end that is none, and log-probabilities that do not fit."""
    settings = {"algorithm": {"name": "f-tis"}, "max_response_tokens": 48}
    agents = [member("wren"), member("finch", "wren")]
    bad = [
        lambda row: ids(row, lambda x: [x[1], *x[1:]] if x[0] != x[1] else [x[0] + 1, *x[1:]]),
        lambda row: ids(row, lambda x: [x[-1], *x[1:]]),
        lambda row: ids(row, lambda x: [10**6, *x[1:]]),
        lambda row: ids(row, lambda x: [-1, *x[1:]]),
        lambda row: ids(row, lambda x: [*x[:-1], x[0]]),
        logprob(-1000.0),
        logprob(5.0),
        put(-0.5, "mean_logprob"),
    ]

    def ended(rows: Rows) -> tuple[Rows, Rows]:
        """As many finished replies as there are bad changes, and the others."""
        chosen = [r for r in rows if r["finish"] == "stop" and len(r["tokens"]["ids"]) > 2]
        chosen = [r for r in chosen if r["shareable"]][: len(bad)]
        assert len(chosen) == len(bad)
        return chosen, [r for r in rows if r not in chosen]

    def lie(rows: Rows) -> list[str]:
        chosen, others = ended(rows)
        return [*(f(row) for f, row in zip(bad, chosen, strict=True)), *dumped(others)]

    lying, notes = train(tmp_path / "bad", monkeypatch, agents, lie, **settings)
    clean, _ = train(
        tmp_path / "clean", monkeypatch, agents, lambda rows: dumped(ended(rows)[1]), **settings
    )
    assert learned(lying) == learned(clean) and weights(lying) == weights(clean)
    row = lying.metric_rows("train", "wren")[0]
    assert row["samples/invalid/tokens"] == 5 and row["samples/invalid/logprob"] == 3
    assert row["peers/samples"] > 0
    assert any("not the text that was judged" in note for note in notes)


def test_rows_of_a_stored_run_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = train(tmp_path / "stored", monkeypatch, [member("finch")], hostile)
    with monkeypatch.context() as patch:  # so that the faults which loading finds come this far
        patch.setattr(replay_module.ReplayAgent, "_check", lambda *args: None)
        replay = {"name": "old", "replay": str(stored.path)}
        run, _ = train(tmp_path / "run", monkeypatch, [member("wren"), replay], dumped)
    row = run.metric_rows("train", "wren")[0]
    assert row["samples/invalid/reward"] == 4 and row["samples/kept/old"] > 0
    with pytest.raises(UserError, match="judged by 'lenient/9'"):
        train(tmp_path / "other", monkeypatch, [member("wren"), replay], dumped)
    colder, _ = train(tmp_path / "cold", monkeypatch, [member("finch")], dumped, temperature=0.9)
    replay = {"name": "old", "replay": str(colder.path)}
    with pytest.raises(UserError, match=r"temperature 0.9, this run has temperature = 1"):
        train(tmp_path / "mixed", monkeypatch, [member("wren"), replay], dumped)
