"""The theory checks of a suite: means over seeds, and their section of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from compare_helpers import agent_run, results

from hacrl.study.compare.checks import theory_checks
from hacrl.study.compare.reading import AgentRun
from hacrl.study.compare.report import as_json, render


def check(step: int, gain: float) -> dict[str, Any]:
    values = {
        "cost/rollouts": 100,
        "unseen/problems": 16,
        "bias/own": 0.0,
        "variance/own": 0.01,
        "spread_squared/own": -0.001,
        "gradient_norm/ant": 2.0,
        "gradient_norm/bee": 1.0,
        "cosine/bee": 0.5,
        "gain/bee": gain,
        "gain_se/bee": 0.001,
    }
    row = {f"diagnostics/{key}": value for key, value in values.items()}
    return {"kind": "train", "step": step, "agent": "ant", **row}


def checked(seed: int, *gains: float) -> AgentRun:
    checks = tuple(check(step, gain) for step, gain in enumerate(gains))
    used = {"peers/used/bee": 0.25, "peers/effective/bee": 0.2}
    return agent_run("hacpo", seed, 0.4, metrics=used, checks=checks, check_seconds=2.0 * seed)


def test_means_over_checks_then_over_seeds() -> None:
    """Seed 1: gains 0.01 and 0.03, mean 0.02; seed 2: 0.04 and 0.04. Mean 0.03, deviation
    0.02 / sqrt(2), half 12.7062 x 0.01. Two checks of 100 rollouts; 2 and 4 seconds."""
    found = theory_checks([checked(1, 0.01, 0.03), checked(2, 0.04, 0.04)])
    assert found is not None
    gain = found.figures["gain/bee"]
    assert gain.mean == pytest.approx(0.03)
    assert gain.high - gain.mean == pytest.approx(0.127062, abs=1e-5)
    assert (found.checks, found.rollouts, found.seconds) == (2, 200, 3)
    assert found.sources("bee") == ["bee", "ant"]
    assert found.warnings == ()
    assert theory_checks([replace(checked(1), checks=())]) is None


def test_the_section_of_the_report() -> None:
    """Seed 2 has three checks at -0.01 +- 0.001: bee hurts there."""
    both = (checked(1, 0.01, 0.01, 0.01), checked(2, -0.01, -0.01, -0.01))
    found = results(*both, reference="hacpo")
    text = render(found, "html")
    assert "<td>1 of 2</td>" in text
    assert "pair / ant, hacpo, seed 2: bee hurts ant: at 3 checks" in text
    assert "+0.00 [-12.71, +12.71]" in text  # mean of +1 and -1 points; half 12.7062 x 1
    assert "<td>25%</td>\n<td>20%</td>" in text
    assert "<td>10.0</td>" in text and "<td>0.0</td>" in text  # root of 0.01; below zero is 0
    row = json.loads(json.dumps(as_json(found), allow_nan=False))["rows"][0]
    assert [w["peer"] for w in row["theory"]["warnings"]] == ["bee"]
    without = results(replace(checked(1), checks=()), reference="hacpo")
    assert "diagnostics.every is 0" in render(without, "html")
