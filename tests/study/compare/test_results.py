"""Figures and verdicts from hand-made readings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.config import parse_config
from hacrl.statistics import Estimate
from hacrl.study.compare.blocks import Listing
from hacrl.study.compare.contents import contents, verdicts
from hacrl.study.compare.reading import Point, Reading, diagnostics, training_seconds
from hacrl.study.compare.report import as_json, page
from hacrl.study.compare.results import Difference, Results, _corrected, _row, difference
from hacrl.study.compare.suite import Cell, LoadedSuite, Suite

CONFIG = parse_config(
    {
        "steps": 2,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
        "agents": [{"name": "ant", "model": "pocket:wren"}],
    }
)


def reading(arm: str, seed: int, *scores: float, agent: str = "ant") -> Reading:
    """An agent that starts at 0.2 and ends at the mean of these scores, one for each problem."""
    cell = Cell("pair", arm, seed, Path("out/cells/pair", arm, f"seed-{seed}"), CONFIG)
    curve = (Point(0, 0, 0.0, 0.2), Point(2, 100, 8.0, sum(scores) / len(scores)))
    by_problem = {f"p{i}": score for i, score in enumerate(scores)}
    return Reading(cell, agent, curve, by_problem, updates=4, diagnostics={"peers/used": 0.5})


def results(*readings: Reading, reference: str = "alone", **settings: Any) -> Results:
    arms = list(dict.fromkeys(r.cell.arm for r in readings))
    suite = Suite.model_validate(
        {"base": {}, "seeds": [1], "reference": reference, "arms": [{"name": a} for a in arms]}
        | settings
    )
    against = [r for r in readings if r.cell.arm == reference]
    rows = [
        _row([r for r in readings if r.cell.arm == arm], against, 1.0, 0.5, reference, Path("out"))
        for arm in arms
    ]
    loaded = LoadedSuite(Path("some/pair.toml"), suite, {}, Path("."))
    target = {("pair", "ant"): 0.5}
    return Results(loaded, (), tuple(_corrected(rows)), target, (), 4, 1, 0.0, {})


def test_differences_are_paired_by_seed_and_problem() -> None:
    """Seed 1: (1,1,0,1) - (0,1,0,1) = mean 1/4; seed 2: (1,1,1,1) - (0,1,1,0) = 1/2; seed 3 has no
    partner. Mean 3/8; deviation sqrt(1/32) = 0.176777, half 12.7062 x 0.176777 / sqrt(2) = 1.58828."""
    mine = [reading("team", 1, 1, 1, 0, 1), reading("team", 2, 1, 1, 1, 1), reading("team", 3, 0)]
    theirs = [reading("alone", 2, 0, 1, 1, 0), reading("alone", 1, 0, 1, 0, 1)]
    found = difference(mine, theirs)
    assert found is not None
    assert found.seeds.mean == pytest.approx(0.375)
    assert found.seeds.high == pytest.approx(0.375 + 1.58828, abs=1e-4)
    assert found.seeds.count == 2
    assert (found.above, found.below) == (2, 0)
    assert difference(mine, [reading("alone", 9, 1)]) is None


@pytest.mark.parametrize(("used", "told"), [(0.003, True), (0.06, False)])
def test_an_arm_that_shared_next_to_nothing_is_told(used: float, told: bool) -> None:
    shared = replace(reading("team", 1, 1, 1), diagnostics={"peers/used": used})
    alone = replace(reading("alone", 1, 0, 1), diagnostics={})
    said = [
        line
        for block in contents(results(shared, alone))
        if isinstance(block, Listing)
        for line in block.items
        if "of its peers' samples" in line
    ]
    assert len(said) == told
    assert not told or said[0].startswith("ant (pair) under team used 0.3 % of its peers' samples")


def test_only_problems_that_all_have_count() -> None:
    """p0 and p1 are common: differences 1 and 0, whatever p2 says."""
    found = difference([reading("team", 1, 1, 1, 1)], [reading("alone", 1, 0, 1)])
    assert found is not None and found.seeds.mean == 0.5


def given(t: tuple[float, float], crossed: tuple[float, float], corrected: float) -> Difference:
    return Difference(
        Estimate(sum(t) / 2, *t, 3, "t"),
        Estimate(sum(t) / 2, *crossed, 3, "crossed bootstrap"),
        above=2,
        below=1,
        p=0.01,
        corrected=corrected,
    )


@pytest.mark.parametrize(
    ("t", "crossed", "corrected", "verdict"),
    [
        ((0.01, 0.05), (0.02, 0.04), 0.05, "better"),
        ((-0.05, -0.01), (-0.04, -0.02), 0.01, "worse"),
        ((0.01, 0.05), (0.02, 0.04), 0.06, "open"),  # not after the correction
        ((-0.001, 0.05), (0.02, 0.04), 0.01, "open"),  # seeds alone do not tell
        ((0.01, 0.05), (0.0, 0.04), 0.01, "open"),  # other problems might say otherwise
        ((0.0, 0.05), (0.02, 0.04), 0.01, "open"),  # zero on the edge is inside
    ],
)
def test_nothing_is_called_better_whose_interval_contains_zero(
    t: tuple[float, float], crossed: tuple[float, float], corrected: float, verdict: str
) -> None:
    assert given(t, crossed, corrected).verdict == verdict


def seeds(arm: str, *gains: int) -> list[Reading]:
    """40 problems, of which 20 + gain are right."""
    made = []
    for seed, gain in enumerate(gains, start=1):
        made.append(reading(arm, seed, *(float(i < 20 + gain) for i in range(40))))
    return made


def test_the_sentence_of_each_agent() -> None:
    """Over alone (20 of 40 right) team gains 9, 10, 11 of 40: mean 25 points, deviation 2.5, t over
    seeds: half 4.302653 x 2.5 / sqrt(3) = 6.2, t = 17.3, p = 0.0033, times three arms 0.01. Over
    problems the difference is 1 for a quarter of 40, so the bootstrap reaches further: about 1.96
    sqrt(1/4 x 3/4 / 40) = 13.4. near gains 1, -1, 0: t alone gives [-6.2, +6.2]."""
    everything = [
        *seeds("alone", 0, 0, 0),
        *seeds("team", 9, 10, 11),
        *seeds("near", 1, -1, 0),
        *seeds("worst", -9, -10, -11),
    ]
    found = results(*everything)
    [sentence] = verdicts(found)
    assert "ant (pair), against alone: " in sentence
    assert re.search(r"team \(\+25\.0 \[[^]]+\], 3 seeds\) is better than alone", sentence)
    assert re.search(r"worst \(-25\.0 \[[^]]+\], 3 seeds\) is worse than alone", sentence)
    assert "near (+0.0 [-6.2, +6.2], 3 seeds) is open: the interval contains zero" in sentence
    team = next(r.difference for r in found.rows if r.arm == "team")
    assert team is not None
    assert (team.seeds.low, team.seeds.high) == pytest.approx((0.188, 0.312), abs=1e-3)
    assert (team.interval.low, team.interval.high) == pytest.approx((0.125, 0.39), abs=0.02)
    corrected = {r.arm: r.difference.corrected for r in found.rows if r.difference}
    assert corrected["team"] == pytest.approx(0.00995, abs=2e-4)
    assert corrected["near"] == 1.0


def test_the_correction_takes_a_win_back() -> None:
    """Gains 10, 8, 12: t = 10 / (2 / sqrt(3)) = 8.66, 1 - 8.66 / sqrt(2 + 75) = 0.0131: a win alone,
    but five such arms against one reference need 0.0131 x 5 = 0.065."""
    one = results(*seeds("alone", 0, 0, 0), *seeds("team", 10, 8, 12))
    assert "is better than alone" in next(verdicts(one))
    many = [r for n in range(5) for r in seeds(f"team{n}", 10, 8, 12)]
    five = results(*seeds("alone", 0, 0, 0), *many)
    assert all(r.difference.verdict == "open" for r in five.rows if r.difference)
    assert "but not after the correction for 5 comparisons" in next(verdicts(five))


def test_one_seed_has_no_verdict() -> None:
    found = results(*seeds("alone", 0), *seeds("team", 20))
    assert "team (+50.0, 1 seed) is open: one seed has no interval" in next(verdicts(found))
    assert found.comparisons == 0
    row = as_json(found)["rows"][1]
    assert row["verdict"] == "open" and row["difference"]["seeds"]["low"] is None
    json.dumps(as_json(found), allow_nan=False)


def test_curves_area_and_target() -> None:
    """From 0.2 at 0 to 0.5 at 100 rollouts and 8 seconds: mean height 0.35, target 0.5 just there;
    the second seed ends at 0.45 and does not reach it."""
    found = results(*seeds("alone", 0, -2))
    [row] = found.rows
    assert row.area is not None and row.area.mean == pytest.approx((0.35 + 0.325) / 2)
    assert (row.rollouts_to_target.mean, row.rollouts_to_target.reached) == (100, 1)
    assert row.seconds_to_target.mean == 8
    last = row.curve[-1]
    assert (last.mean, last.low, last.high) == pytest.approx((0.475, 0.45, 0.5))
    assert row.files[0] == "cells/pair/alone/seed-1/evaluation/step-000002/ant"


def test_names_are_never_markup() -> None:
    found = results(*seeds("alone", 0, 0), *seeds("team", 1, 2))
    blocks = list(contents(found))
    text = page("<script>alert(1)</script>", blocks)
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_seconds_of_a_step_made_twice_count_once(tmp_path: Path) -> None:
    """Step 1 was killed and resumed: sampling 2 s from the first time, updates 1.5 from the second.
    Evaluation belongs to no agent."""
    rows = [
        {"step": 0, "agent": "ant", "sample": 1.0, "update": 2.0},
        {"step": 0, "agent": "bee", "sample": 0.5},
        {"step": 0, "agent": "", "evaluate": 9.0},
        {"step": 1, "agent": "ant", "sample": 2.0, "update": 1.0},
        {"step": 1, "agent": "ant", "update": 1.5},
    ]
    (tmp_path / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert training_seconds(tmp_path / "times.jsonl") == {0: 3.5, 1: 3.5}


def test_diagnostics_are_means_over_steps() -> None:
    """Effective share 6/12 and 2/8: mean 0.375. Unknown values are left out, lengths not shown."""
    rows = [
        {
            "peers/used": 0.5,
            "peers/effective_samples": 6.0,
            "peers/forwarded": 12,
            "ratio/bee": 0.9,
        },
        {
            "peers/used": None,
            "peers/effective_samples": 2.0,
            "peers/forwarded": 8,
            "ratio/bee": 0.7,
        },
        {"ratio/bee/short": 0.1, "diagnostics/bias": 0.25, "loss": 3.0},
    ]
    found = diagnostics(rows)
    assert found["peers/used"] == 0.5
    assert found["peers/effective_share"] == pytest.approx(0.375)
    assert found["ratio/bee"] == pytest.approx(0.8)
    assert found["diagnostics/bias"] == 0.25
    assert not {"ratio/bee/short", "loss"} & set(found)
