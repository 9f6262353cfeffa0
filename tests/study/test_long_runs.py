"""scripts/long_runs.py: rollouts until an accuracy is reached, by hand."""

import pytest
from long_runs import against, cell, exchange_rate, first, table


def curve(*accuracies: float) -> list[dict[str, float]]:
    return [{"rollouts": 100 * i, "accuracy": a} for i, a in enumerate(accuracies)]


def test_where_a_curve_first_reaches_a_target() -> None:
    """0.3 and 0.2 become their mean 0.25. From there to 0.65, 0.45 is halfway: 250 rollouts."""
    assert first(curve(0.0, 0.3, 0.2, 0.65), 0.45) == pytest.approx(250)
    assert first(curve(0.0, 0.3, 0.2, 0.65), 0.7) is None


def test_the_factor_is_a_geometric_mean_over_seeds() -> None:
    """Alone 0.4 takes 200 rollouts; in the team 100 and 50: factors 2 and 4, mean sqrt(8) = 2.83, and
    sqrt(100 * 50) = 71 rollouts. A third seed that misses the target is left out."""
    alone = dict.fromkeys("123", curve(0.0, 0.2, 0.4))
    team = {"1": curve(0.0, 0.4), "2": curve(0.0, 0.8), "3": curve(0.0, 0.1)}
    assert cell(team, alone, 0.4).startswith("71, 2.83 [")
    assert cell(alone, alone, 0.4) == "200"
    assert cell(team, alone, 0.9) == "0 of 3 seeds"


def test_rollouts_as_a_fraction_of_double_rollouts() -> None:
    """Double rollouts reach 0.4 after 200, the team after 50: a quarter."""
    double, team = (dict.fromkeys("12", curve(*c)) for c in ((0.0, 0.2, 0.4), (0.0, 0.8)))
    found = {("a", "two", "gspo_x2"): double, ("a", "two", "naive"): team}
    lines = against("gspo_x2", found, (40, 90)).splitlines()
    assert lines[-1] == "| a, naive | 0.25 [0.25, 0.25] |  |" and len(lines) == 4
    found["a", "three", "naive"], found["a", "three", "hacpo"] = double, team
    lines = against("naive", found, (40,)).splitlines()
    assert lines[-1] == "| a, hacpo in three | 0.25 [0.25, 0.25] |"


def test_two_seeds_that_miss_the_target_leave_no_factor() -> None:
    """Of four seeds one may miss it, two may not."""
    alone = dict.fromkeys("1234", curve(0.0, 0.4))
    low, high = curve(0.0, 0.1), curve(0.0, 0.8)
    assert exchange_rate({"1": high, "2": high, "3": high, "4": low}, alone, 0.4)
    assert exchange_rate({"1": high, "2": high, "3": low, "4": low}, alone, 0.4) is None


def test_teams_are_named_and_an_agent_without_a_run_alone_has_no_table() -> None:
    runs = dict.fromkeys("12", curve(0.0, 0.8))
    found = {
        ("a", "two", "gspo"): runs,
        ("a", "two", "naive"): runs,
        ("a", "useless", "naive"): runs,
        ("weak", "useless", "naive"): runs,
    }
    rows = [line.split(" | ")[0] for line in table(found, (40,)).splitlines() if line]
    assert rows == [
        "| a, percent",
        "|---|---|",
        "| gspo",
        "| naive",
        "| naive beside a useless partner",
    ]
