"""When a peer counts as harmful."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from team import member, team

from hacrl.config import Config, parse_config
from hacrl.store.rundir import RunDirectory
from hacrl.study.diagnostics.harm import Gain, HarmWatch, find_harm, upper_end


def config(*names: str) -> Config:
    return parse_config(team(*(member(n, "wren", learn=n != "old") for n in names), steps=9))


def row(step: int, gain: float | None, error: float = 0.002, agent: str = "ant") -> dict[str, Any]:
    values = {"gain/old": gain, "gain_se/old": error, "gain/ant": 0.03, "gain_se/ant": 0.002}
    values |= {"unseen/problems": 16, "cost/rollouts": 64}
    named = {f"diagnostics/{name}": value for name, value in values.items()}
    return {"kind": "train", "step": step, "agent": agent, **named}


def test_the_upper_end_by_hand() -> None:
    """Three checks of -0.01 +- 0.002 with 16 problems: error 0.002 / sqrt(3), 45 degrees of freedom.
    One pair: the first look takes half of 5 %, t(0.975, 45) = 2.0141: -0.01 + 0.0023257. The second
    look has a sixth of 5 %, t(0.99167, 60) = 2.4630: -0.01 + 0.001 x 2.4630. With two pairs each
    has half of it all: t(0.9875, 45) = 2.3189."""
    checks = [Gain(s, -0.01, 0.002, 16) for s in range(4)]
    assert upper_end(checks[:3], 1) == pytest.approx(-0.01 + 0.0023257, abs=1e-6)
    assert upper_end(checks, 1) == pytest.approx(-0.01 + 0.0024630, abs=2e-6)
    assert upper_end(checks[:3], 2) == pytest.approx(-0.01 + 2.3189 * 0.002 / 3**0.5, abs=1e-6)


def test_a_peer_that_hurts_is_found_and_one_that_does_not_is_not() -> None:
    [harm] = find_harm(config("ant", "old"), [row(s, -0.01) for s in (0, 3, 6, 9)])
    assert (harm.learner, harm.peer, harm.step, harm.checks) == ("ant", "old", 6, 3)
    assert harm.mean == pytest.approx(-0.01) and harm.own == pytest.approx(0.03)
    assert harm.sentence.startswith("old hurts ant: at 3 checks up to step 7")
    assert "-1.00 points" in harm.sentence and "+3.00" in harm.sentence
    for gain, error in ((0.01, 0.002), (-0.01, 0.02), (0.0, 0.0)):
        assert find_harm(config("ant", "old"), [row(s, gain, error) for s in range(9)]) == []


def test_checks_that_could_not_be_made_do_not_count() -> None:
    rows = [row(0, -0.01), row(1, None), row(2, -0.01), row(3, float("nan")), row(4, -0.01)]
    [harm] = find_harm(config("ant", "old"), rows)
    assert (harm.step, harm.checks) == (4, 3)
    assert find_harm(config("ant", "old"), rows[:4]) == []


def test_noise_alone_seldom_warns() -> None:
    """3,000 runs of 30 checks in which the peer brings nothing: at most 5 percent warn, though each is
    looked at 28 times. (A plain 95 % bound at every look would warn in more than a fifth of them.)"""
    draws = np.random.default_rng(0).normal(0, 1, (3000, 30))
    warned = plain = 0
    bound = {c: upper_end([Gain(s, 0.0, 1.0, 16) for s in range(c)], 1) for c in range(3, 31)}
    for run in draws:
        means = np.cumsum(run) / np.arange(1, 31)
        warned += any(means[c - 1] + bound[c] < 0 for c in bound)
        plain += any(means[c - 1] + 1.645 / c**0.5 < 0 for c in bound)
    assert warned <= 0.05 * 3000 < 0.2 * 3000 < plain


def test_each_harm_is_reported_once_also_after_a_resume(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config("ant", "old"))
    watch = HarmWatch(run)
    warned = []
    for step in range(4):
        rows = [row(step, -0.01), {"kind": "train", "step": step, "agent": "old"}]
        run.add_metrics(rows)
        warned += watch.look(rows)
    assert len(warned) == 1 and warned[0].startswith("old hurts ant: at 3 checks up to step 3")
    assert HarmWatch(run).look([row(4, -0.01)]) == []
    run.rewind(2)  # before the warning
    assert len(HarmWatch(run).look([row(2, -0.01)])) == 1
