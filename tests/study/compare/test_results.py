"""Numbers and verdicts from hand-made agent runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from compare_helpers import agent_run, results

from hacrl.statistics import Estimate
from hacrl.study.compare.reading import AgentRun, first_reach, mean_height, mean_metrics
from hacrl.study.compare.report import as_json, render, verdicts
from hacrl.study.compare.results import Difference, difference


def test_differences_are_paired_by_seed_and_problem() -> None:
    """Seed 1: (1,1,0,1) - (0,1,0,1) = mean 1/4; seed 2: (1,1,1,1) - (0,1,1,0) = 1/2; seed 3 has no
    partner. Mean 3/8; deviation sqrt(1/32) = 0.176777, half 12.7062 x 0.176777 / sqrt(2) = 1.58828."""
    mine = [
        agent_run("team", 1, 1, 1, 0, 1),
        agent_run("team", 2, 1, 1, 1, 1),
        agent_run("team", 3, 0),
    ]
    theirs = [agent_run("alone", 2, 0, 1, 1, 0), agent_run("alone", 1, 0, 1, 0, 1)]
    found = difference(mine, theirs)
    assert found is not None
    assert found.seeds.mean == pytest.approx(0.375)
    assert found.seeds.high == pytest.approx(0.375 + 1.58828, abs=1e-4)
    assert found.seeds.count == 2
    assert (found.above, found.below) == (2, 0)
    assert difference(mine, [agent_run("alone", 9, 1)]) is None


def test_only_problems_that_all_have_count() -> None:
    """p0 and p1 are common: differences 1 and 0; p2 does not count."""
    found = difference([agent_run("team", 1, 1, 1, 1)], [agent_run("alone", 1, 0, 1)])
    assert found is not None and found.seeds.mean == 0.5


@pytest.mark.parametrize(("used", "reported"), [(0.003, True), (0.06, False)])
def test_an_arm_that_used_almost_no_peers_is_reported(used: float, reported: bool) -> None:
    team = agent_run("team", 1, 1, 1, metrics={"peers/used": used})
    text = render(results(team, agent_run("alone", 1, 0, 1, metrics={})), "md")
    assert ("ant (pair) under team used 0.3 % of its peers' samples" in text) == reported


@pytest.mark.parametrize(
    ("t", "crossed", "corrected", "verdict"),
    [
        ((0.01, 0.05), (0.02, 0.04), 0.05, "better"),
        ((-0.05, -0.01), (-0.04, -0.02), 0.01, "worse"),
        ((0.01, 0.05), (0.02, 0.04), 0.06, "open"),  # not after the correction
        ((-0.001, 0.05), (0.02, 0.04), 0.01, "open"),  # the interval over seeds contains zero
        ((0.01, 0.05), (0.0, 0.04), 0.01, "open"),  # the interval over problems contains zero
        ((0.0, 0.05), (0.02, 0.04), 0.01, "open"),  # zero on the edge is inside
    ],
)
def test_nothing_is_better_if_its_interval_contains_zero(
    t: tuple[float, float], crossed: tuple[float, float], corrected: float, verdict: str
) -> None:
    mean = sum(t) / 2
    seeds, problems = Estimate(mean, *t, 3, "t"), Estimate(mean, *crossed, 3, "crossed bootstrap")
    assert Difference(seeds, problems, 2, 1, p=0.01, corrected=corrected).verdict == verdict


def seeds(arm: str, *gains: int) -> list[AgentRun]:
    """40 problems, of which 20 + gain are right."""
    return [
        agent_run(arm, seed, *(float(i < 20 + gain) for i in range(40)))
        for seed, gain in enumerate(gains, start=1)
    ]


def test_the_sentence_of_each_agent() -> None:
    """Over alone (20 of 40 right) team gains 9, 10, 11 of 40: mean 25 points, deviation 2.5, t over
    seeds: half 4.302653 x 2.5 / sqrt(3) = 6.2, t = 17.3, p = 0.0033, times three arms 0.01. Over
    problems the difference is 1 for a quarter of 40, so the bootstrap reaches further: about 1.96
    sqrt(1/4 x 3/4 / 40) = 13.4. near gains 1, -1, 0: t alone gives [-6.2, +6.2]."""
    found = results(
        *seeds("alone", 0, 0, 0),
        *seeds("near", 1, -1, 0),
        *seeds("team", 9, 10, 11),
        *seeds("worst", -9, -10, -11),
    )
    [sentence] = verdicts(found)
    assert re.fullmatch(
        r"ant \(pair\), against alone: team \(\+25\.0 \[[^]]+\], 3 seeds\) is better than alone; "
        r"worst \(-25\.0 \[[^]]+\], 3 seeds\) is worse than alone; "
        r"near \(\+0\.0 \[-6\.2, \+6\.2\], 3 seeds\) is open: the interval contains zero\.",
        sentence,
    )
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


def test_one_seed_has_an_interval_over_problems_and_no_verdict() -> None:
    """20 of 40 problems are gained: bootstrap half width about 1.96 sqrt(1/4 / 40) = 15.5 points."""
    found = results(*seeds("alone", 0), *seeds("team", 20))
    sentence = next(verdicts(found))
    assert re.search(
        r"team \(\+50\.0 \[\+3\d\.\d, \+6\d\.\d\], 1 seed\) is open: one seed", sentence
    )
    assert found.comparisons == 0
    row = as_json(found)["rows"][1]
    assert row["verdict"] == "open" and row["difference"]["seeds"]["low"] is None
    json.dumps(as_json(found), allow_nan=False)


def test_an_arm_without_a_finished_reference_is_not_compared() -> None:
    found = results(*seeds("team", 1), *(replace(r, agent="bee") for r in seeds("alone", 0)))
    assert "team is not compared yet: no finished seed of alone" in next(
        verdicts(replace(found, rows=(replace(found.rows[0], difference=None),)))
    )


def test_curves_area_and_target() -> None:
    """From 0.2 at 0 to 0.5 at 100 rollouts and 8 seconds: mean height 0.35, target 0.5 just there;
    the second seed ends at 0.45 and does not reach it."""
    [row] = results(*seeds("alone", 0, -2)).rows
    assert row.area is not None and row.area.mean == pytest.approx((0.35 + 0.325) / 2)
    assert (row.rollouts_to_target.mean, row.rollouts_to_target.reached) == (100, 1)
    assert row.seconds_to_target.mean == 8
    last = row.curve[-1]
    assert (last.mean, last.low, last.high) == pytest.approx((0.475, 0.45, 0.5))
    assert row.files[0] == "runs/pair/alone/seed-1/evaluation/step-000002/ant"


def test_learning_curves_by_hand() -> None:
    """Area 10 x 0.2 + 10 x 0.4 = 6 over a width of 20. From 0.2 to 0.6 within 10, 0.5 is passed at
    three quarters; a later dip does not count."""
    assert mean_height([(0, 0.0), (10, 0.4), (20, 0.4)]) == pytest.approx(0.3)
    assert mean_height([(0, 0.4)]) is None
    assert mean_height([(0, 0.4), (0, 0.4)]) is None
    curve = [(0, 0.2), (10, 0.6), (20, 0.4)]
    assert first_reach(curve, 0.5) == pytest.approx(7.5)
    assert first_reach(curve, 0.2) == 0
    assert first_reach(curve, 0.7) is None


def test_html_is_escaped_and_paths_in_markdown_are_relative() -> None:
    found = results(*seeds("alone", 0, 0), *seeds("team", 1, 2))
    found.suite._path = Path("<script>alert(1)</script>.toml")
    text = render(found, "html")
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "(../../runs/pair/team/seed-2)" in render(found, "md", "../../")


def test_metrics_are_means_over_steps() -> None:
    """Effective fraction 6/12 and 2/8: mean 0.375. Null values do not count; other metrics are not
    shown."""
    forwarded = {"peers/effective_samples": 6.0, "peers/forwarded": 12}
    rows = [
        {"peers/used": 0.5, **forwarded, "ratio/bee": 0.9, "peers/used/bee": 0.5},
        {"peers/used": None, **forwarded, "ratio/bee": 0.7, "peers/effective/bee": None},
        {"ratio/bee/short": 0.1, "diagnostics/bias": 0.25, "loss": 3.0, "peers/x/bee": 1.0},
    ]
    rows[1] |= {"peers/effective_samples": 2.0, "peers/forwarded": 8}
    found = mean_metrics(rows)
    assert found["peers/used"] == found["peers/used/bee"] == 0.5
    assert found["peers/effective_fraction"] == pytest.approx(0.375)
    assert found["ratio/bee"] == pytest.approx(0.8)
    assert found["diagnostics/bias"] == 0.25
    assert not {"ratio/bee/short", "loss", "peers/effective/bee", "peers/x/bee"} & set(found)
