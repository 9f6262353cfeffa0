"""The second round of learning rates, and what is chosen (scripts/choose_rates.py)."""

import pytest
from choose_rates import first, print_choice, second

FOUND = {
    "naive": {"ant": {"5e-6": 40.0, "1e-5": 44.0}, "bee": {"5e-6": 30.0, "1e-5": 27.0}},
    "hacpo": {"ant": {"5e-6": 41.0, "1e-5": 40.0}, "bee": {"5e-6": 30.0, "1e-5": 30.0}},
    "hacpo-floor-0.5": {"ant": {"5e-6": 42.0}, "bee": {"5e-6": 30.0}},
    "hacpo-floor-0.2": {"ant": {"5e-6": 41.0}, "bee": {"5e-6": 33.0}},
}


def test_the_second_round_goes_on_in_the_better_direction() -> None:
    """naive gains 4 and loses 3 at the higher rate: +0.5 on average. hacpo loses 0.5."""
    assert second(FOUND) == ["naive-rate-2e-5", "hacpo-rate-2.5e-6"]


def test_every_agent_has_its_best_rate_and_hacpo_the_best_floor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Floor 0.5: mean of 42 and 30 = 36; floor 0.2: mean of 41 and 33 = 37."""
    print_choice(FOUND)
    *_, naive, hacpo, floor = capsys.readouterr().out.splitlines()
    assert naive == "naive: agents = { ant.learning_rate = 1e-5, bee.learning_rate = 5e-6 }"
    assert hacpo == "hacpo: agents = { ant.learning_rate = 5e-6, bee.learning_rate = 5e-6 }"
    assert floor == "floor: hacpo-floor-0.2"


def test_the_first_round_has_two_rates_and_the_floors() -> None:
    names = first()
    assert len(names) == 13  # five rules at two rates, three floors
    assert "overlap-rate-1e-5" in names and "overlap-rate-2e-5" not in names
