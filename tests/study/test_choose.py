"""scripts/choose_rule.py and scripts/choose_rates.py: the criteria by hand."""

from choose_rates import at_the_end, chosen
from choose_rule import choose, gaps

GRID = {"open-level": 1, "open-level-first": 2, "open-wins": 3}
GRID |= {"right-level": 0, "right-level-first": 6, "right-wins": 1}
RATES = {
    "naive": {"smollm2": {"5e-6": 40.0, "1e-5": 44.0}, "gemma3": {"5e-6": 30.0, "1e-5": 27.0}},
    "hacpo": {"smollm2": {"5e-6": 41.0, "1e-5": 40.0}, "gemma3": {"5e-6": 31.0, "1e-5": 30.0}},
    "hacpo-floor-0.5": {"smollm2": {"1e-5": 42.0}, "gemma3": {"5e-6": 30.0}},
    "hacpo-floor-0.2": {"smollm2": {"1e-5": 41.0}, "gemma3": {"5e-6": 33.0}},
}


def test_the_gap_is_to_the_better_of_naive_and_overlap() -> None:
    after = {"naive": {"a": 50, "b": 60}, "overlap": {"a": 52, "b": 59}, "x": {"a": 53, "b": 58}}
    assert gaps(after)["x"] == {"a": 1, "b": -2}


def test_settings_are_chosen_by_all_their_arms_and_a_tie_by_the_worst_agent() -> None:
    """open: (1 + 2 + 3) / 3 = 2; right: 7/3. level 0.5, level-first 4, wins 2. So right-level-first, 6.
    overlap-first has 5.6 and the better worst agent: within 0.5 points it wins; with 5.4 it does not."""
    scores = GRID | {"overlap-open": 0, "hacpo-open": 0}
    gap = {arm: {"a": s + 2, "b": s - 2} for arm, s in scores.items()}
    arm, settings = choose(gap | {"overlap-first": {"a": 5.4, "b": 5.4}})
    assert arm == "right-level-first"
    assert settings == {"open": 2, "right": 7 / 3, "level": 0.5, "level-first": 4, "wins": 2}
    assert choose(gap | {"overlap-first": {"a": 5.6, "b": 5.6}})[0] == "overlap-first"


def test_learning_rates() -> None:
    """Every agent has its best rate. The mean of floor 0.5 is 36, that of floor 0.2 is 37."""
    naive = {"smollm2": "1e-5", "gemma3": "5e-6"}
    hacpo = {"smollm2": "5e-6", "gemma3": "5e-6"}
    assert chosen(RATES) == {"naive": naive, "hacpo": hacpo, "hacpo-floor-0.2": naive}


def test_the_ends_of_the_tried_rates() -> None:
    """As numbers, not as text: 1e-5 lies between 5e-6 and 2e-5."""
    rates = ("5e-6", "1e-5", "2e-5")
    assert [at_the_end(rate, rates) for rate in rates] == [True, False, True]
    assert not at_the_end("1e-5", ["1e-5"])
