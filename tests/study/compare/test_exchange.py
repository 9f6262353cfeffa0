"""The exchange rate: worked numbers, censoring, verdicts, and a simulation with a known f."""

import json
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import isotonic_regression
from team import member, team

from hacrl.config import Config, parse_config
from hacrl.study.compare.exchange import Exchange, exchange_rate, invert, isotonic, solve
from hacrl.study.compare.reading import AgentRun, Point
from hacrl.study.compare.report import as_json, render, tables
from hacrl.study.compare.results import Results, make_rows
from hacrl.study.compare.suite import Run, Suite
from hacrl.study.tables import console


def config(algorithm: str, bee_samples: int = 8) -> Config:
    agents = member("ant", "wren"), member("bee", "finch", samples_per_prompt=bee_samples)
    return parse_config(team(*agents, samples_per_prompt=8, algorithm={"name": algorithm}))


def runs(arm: str, rollouts: int, *right: int, algorithm: str = "gspo") -> list[AgentRun]:
    """One run a seed; `right` of 100 problems are right."""
    found = []
    for seed, count in enumerate(right, start=1):
        run = Run("pair", arm, seed, Path(f"out/runs/pair/{arm}/seed-{seed}"), config(algorithm))
        scores = {f"p{i}": float(i < count) for i in range(100)}
        curve = (Point(0, 0, 0.0, 0.2), Point(2, rollouts, 8.0, count / 100))
        found.append(AgentRun(run, "ant", curve, scores, updates=4, metrics={}))
    return found


ALONE = [runs("x1", 64, 30, 30), runs("x2", 128, 40, 40), runs("x4", 256, 60, 60)]


def test_f_by_hand() -> None:
    """Alone 30, 40, 60 at 64, 128, 256 rollouts. The team has 50 with 64 own rollouts: halfway from x2
    to x4, so f = 2^1.5. With 128 own rollouts the multiples and f are half of that."""
    found = exchange_rate(runs("team", 64, 50, 50, algorithm="hacpo"), ALONE)
    assert (found.multiples, found.n, found.seeds) == ((1, 2, 4), 2, 2)
    assert found.curve == pytest.approx((0.3, 0.4, 0.6))
    assert found.f == pytest.approx(2**1.5)
    assert 2 < found.low < found.f < found.high < 4  # only problems vary: about 10 problems +- 6
    half = exchange_rate(runs("team", 128, 50, 50), ALONE)
    assert half.f == pytest.approx(2**0.5)
    assert half.multiples == (0.5, 1, 2) and half.n == 1  # gspo uses no peers
    assert exchange_rate(runs("team", 64, 50), [ALONE[0], []]) is None
    [mine] = runs("team", 64, 50)  # bee samples 24 replies for 8 of ant
    mine = replace(mine, run=replace(mine.run, config=config("hacpo", 24)))
    assert exchange_rate([mine], ALONE).n == 32 / 8


@pytest.mark.parametrize(
    ("right", "f", "text"),
    [
        (60, 4.0, "4.00 ["),
        (90, inf, "> 4 [> 4, > 4]"),
        (30, 1.0, "1.00 ["),
        (5, 0, "< 1 [< 1, < 1]"),
    ],
)
def test_beyond_the_curve_f_is_only_bounded(right: int, f: float, text: str) -> None:
    found = exchange_rate(runs("team", 64, right, right), ALONE)
    assert found.f == pytest.approx(f) and found.text.startswith(text)


def test_a_flat_curve_does_not_identify_f() -> None:
    """50 of 100 in every arm alone but for one problem; a curve that falls is flat, too."""
    for last in (51, 30):
        flat = [runs("x1", 64, 50, 50), runs("x2", 128, 50, 50), runs("x4", 256, last, last - 2)]
        found = exchange_rate(runs("team", 64, 70, 70), flat)
        assert found.flat and found.text == found.parity == "not identifiable"


@pytest.mark.parametrize(
    ("low", "high", "n", "seeds", "parity"),
    [
        (2.0, 3.0, 2, 8, "shown"),
        (1.9, 3.0, 2, 8, "open"),
        (1.2, 1.9, 2, 8, "refuted"),
        (2.0, 3.0, 2, 1, "open"),  # one seed
        (inf, inf, 4, 8, "shown"),  # above 4
        (inf, inf, 5, 8, "open"),  # the curve ends at 4
        (3.0, inf, 5, 8, "open"),
        (0.0, 0.0, 1, 8, "refuted"),  # below 1
        (0.0, 1.5, 1, 8, "open"),
    ],
)
def test_verdicts_on_n(low: float, high: float, n: float, seeds: int, parity: str) -> None:
    found = Exchange(low, low, high, n, (1.0, 2.0, 4.0), (0.3, 0.4, 0.6), seeds, flat=False)
    assert found.parity == parity
    assert replace(found, flat=True).parity == "not identifiable"


def test_the_fit_is_isotonic_regression() -> None:
    assert isotonic([[1.0, 3.0, 2.0]]).tolist() == [[1.0, 2.5, 2.5]]
    values = np.random.default_rng(0).normal(size=(50, 5))
    expected = [isotonic_regression(row).x for row in values]
    assert np.allclose(isotonic(values), expected)


def test_the_first_point_of_a_step_counts() -> None:
    """0.3 at x1 and x2, 0.5 at x4: 0.3 is reached at x1, 0.4 halfway between x2 and x4."""
    curve = [[0.3, 0.3, 0.5]]
    assert [float(invert([0, 1, 2], curve, [y])[0]) for y in (0.3, 0.4)] == pytest.approx(
        [1, 2**1.5]
    )


def simulate(seed: int, f: float, rise: float = 0.06) -> tuple[float, float, bool]:
    """8 seeds x 300 problems; alone 0.4 + rise log2(m), the team as alone with m = f. Seeds differ by
    1.2 points, single replies by 40."""
    draw = np.random.default_rng(seed)
    level = 0.4 + rise * np.log2([f, 1.0, 2.0, 4.0])
    table = level[:, None, None] + draw.normal(0, 0.25, 300) + draw.normal(0, 0.4, (4, 8, 300))
    table += draw.normal(0, 0.012, (4, 8, 1))
    _, low, high, _, flat = solve(table, (1.0, 2.0, 4.0))
    return low, high, flat


@pytest.mark.parametrize("f", [1.4, 2.8])
def test_the_interval_covers_a_known_f(f: float) -> None:
    """95 % of 150: 142.5 with a deviation of 2.7."""
    found = [simulate(seed, f) for seed in range(150)]
    covered = sum(low <= f <= high for low, high, _ in found)
    assert 135 <= covered <= 149
    assert not any(flat for *_, flat in found)


def test_a_curve_without_rise_is_seldom_taken_for_one() -> None:
    """A rise is claimed with probability 2.5 %: 3.75 of 150, deviation 1.9."""
    assert sum(not simulate(seed, 2.0, rise=0.0)[2] for seed in range(150)) <= 10


def test_the_report_has_the_rates() -> None:
    together = [*runs("team", 64, 50, 50, algorithm="hacpo"), *runs("top", 64, 90, 90)]
    names = ["x1", "x2", "x4"]
    alone = [{"name": name, "factor": 2.0**i} for i, name in enumerate(names)]
    suite = Suite.model_validate(
        {"base": {}, "seeds": [1], "reference": "x1", "alone": names}
        | {"arms": [*alone, {"name": "team"}, {"name": "top"}]}
    )
    rows = make_rows(suite, [*chain(*ALONE), *together], "x1", Path("out"))
    found = Results(suite, "x1", (), tuple(rows), ("pair/x4/seed-9",), 100, 1, {})
    stored = json.loads(json.dumps(as_json(found), allow_nan=False))["rows"]
    assert [row["exchange"] and row["exchange"]["parity"] for row in stored] == [
        *[None] * 3,
        "shown",
        "shown",
    ]
    assert stored[3]["exchange"]["f"] == pytest.approx(2**1.5)
    assert stored[4]["exchange"]["f"] is None and stored[4]["exchange"]["text"] == "> 4 [> 4, > 4]"
    text = render(found)
    assert "| pair / ant | team | 2 | x1: 30.0, x2: 40.0, x4: 60.0 |" in text
    line = "f >= n is shown for 1, open for 0, refuted for 0, not identifiable for 0 of 1 agent."
    assert f"- team: {line}" in text
    assert "## Exchange rate" in text
    with (terminal := console()).capture() as captured:
        terminal.print(*tables(found))
    assert "2.83 [" in captured.get() and "f >= n" in captured.get()
    assert "Not finished and left out: 1 run" in captured.get()


@pytest.mark.parametrize(
    ("alone", "factor", "message"),
    [
        (["gspo"], 2, "two arms or more with growing factors"),
        (["gspo", "hacpo"], 1, "two arms or more with growing factors"),
        (["gspo", "grpo"], 2, "alone: grpo: no such arm"),
    ],
)
def test_a_suite_without_a_curve_is_refused(alone: list[str], factor: int, message: str) -> None:
    arms = [{"name": "gspo"}, {"name": "hacpo", "factor": factor}]
    suite = {"base": {}, "seeds": [1], "reference": "gspo", "arms": arms, "alone": alone}
    with pytest.raises(ValueError, match=message):
        Suite.model_validate(suite)
