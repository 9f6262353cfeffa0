"""The checks of the theory in a suite's report, and out of its budgets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.config import parse_config
from hacrl.study.compare.reading import (
    Point,
    Reading,
    checking_seconds,
    diagnostics,
    training_seconds,
)
from hacrl.study.compare.report import as_json, page
from hacrl.study.compare.results import Results, _row
from hacrl.study.compare.suite import Cell, LoadedSuite, Suite
from hacrl.study.compare.theory import theory
from hacrl.study.compare.theory_blocks import theory_blocks

CONFIG = parse_config(
    {
        "steps": 9,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
        "agents": [
            {"name": "ant", "model": "pocket:wren"},
            {"name": "bee", "model": "pocket:wren", "learn": False},
        ],
    }
)


def check(step: int, gain: float, **figures: float) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "agent": "ant",
        "diagnostics/cost/rollouts": 100,
        "diagnostics/unseen/problems": 16,
        "diagnostics/bias/own": 0.0,
        "diagnostics/variance/own": 0.01,
        "diagnostics/spread_squared/own": -0.001,
        "diagnostics/gradient_norm/ant": 2.0,
        "diagnostics/gradient_norm/bee": 1.0,
        "diagnostics/cosine/bee": 0.5,
        "diagnostics/gain/bee": gain,
        "diagnostics/gain_se/bee": 0.001,
        **figures,
    }


def reading(seed: int, *gains: float) -> Reading:
    cell = Cell("pair", "hacpo", seed, Path("out/cells/pair/hacpo", f"seed-{seed}"), CONFIG)
    checks = tuple(check(s, g) for s, g in enumerate(gains))
    curve = (Point(0, 0, 0.0, 0.2), Point(9, 100, 8.0, 0.4))
    used = {"peers/used/bee": 0.25, "peers/effective/bee": 0.2}
    return Reading(cell, "ant", curve, {"p": 0.4}, 4, used, checks, checking=2.0 * seed)


def test_means_over_checks_then_over_seeds() -> None:
    """Seed 1: gains 0.01 and 0.03, mean 0.02; seed 2: 0.04 and 0.04. Mean 0.03, deviation
    0.02 / sqrt(2), half 12.7062 x 0.01. Two checks of 100 rollouts; 2 and 4 seconds."""
    found = theory([reading(1, 0.01, 0.03), reading(2, 0.04, 0.04)])
    assert found is not None
    gain = found.figures["gain/bee"]
    assert gain.mean == pytest.approx(0.03)
    assert gain.high - gain.mean == pytest.approx(0.127062, abs=1e-5)
    assert (found.checks, found.rollouts, found.seconds) == (2, 200, 3)
    assert found.sources("bee") == ["bee", "ant"]
    assert found.warnings == ()
    assert theory([replace(reading(1), checks=())]) is None


def results(*readings: Reading) -> Results:
    suite = Suite.model_validate(
        {"base": {}, "seeds": [1], "reference": "hacpo", "arms": [{"name": "hacpo"}]}
    )
    row = _row(readings, readings, 1.0, 0.5, "hacpo", Path("out"))
    loaded = LoadedSuite(Path("some/pair.toml"), suite, {}, Path("."))
    return Results(loaded, (), (row,), {}, (), 1, 1, 0.0, {})


def test_the_section_of_the_report() -> None:
    """Seed 2 has three checks at -0.01 +- 0.001: bee hurts there."""
    found = results(reading(1, 0.01, 0.01, 0.01), reading(2, -0.01, -0.01, -0.01))
    blocks = list(theory_blocks(found))
    text = page("t", blocks)
    assert "<td>1 of 2</td>" in text
    assert "pair / ant, hacpo, seed 2: bee hurts ant: at 3 checks" in text
    assert "+0.00 [-12.71, +12.71]" in text  # mean of +1 and -1 points; half 12.7062 x 1
    assert "<td>25%</td><td>20%</td>" in text
    assert "<td>10.0</td>" in text and "<td>0.0</td>" in text  # root of 0.01; below zero is none
    row = json.loads(json.dumps(as_json(found), allow_nan=False))["rows"][0]
    assert [w["peer"] for w in row["theory"]["warnings"]] == ["bee"]


def test_without_checks_the_report_says_how_to_have_them() -> None:
    text = page("t", list(theory_blocks(results(replace(reading(1), checks=())))))
    assert "diagnostics.every is 0" in text


def test_checks_are_in_no_budget(tmp_path: Path) -> None:
    """Step 0: 3 seconds of work and 5 of checks. Rollouts of a check are not the agent's own."""
    rows = [
        {"step": 0, "agent": "ant", "sample": 1.0, "update": 2.0, "diagnostics": 5.0},
        {"step": 3, "agent": "ant", "sample": 1.0, "diagnostics": 4.0},
        {"step": 3, "agent": "bee", "sample": 1.0, "diagnostics": 3.0},
    ]
    path = tmp_path / "times.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert training_seconds(path) == {0: 3.0, 3: 2.0}
    assert checking_seconds(path, "ant", 4) == 9.0
    assert checking_seconds(path, "ant", 3) == 5.0


def test_shares_of_each_source_are_always_there() -> None:
    found = diagnostics([{"peers/used/bee": 0.5, "peers/effective/bee": None, "peers/x/bee": 1.0}])
    assert found == {"peers/used/bee": 0.5}
