"""The second round of learning rates, and what is chosen (scripts/choose_rates.py)."""

import pytest
from choose_rates import chosen, first, print_choice, second

FOUND = {
    "naive": {"smollm2": {"5e-6": 40.0, "1e-5": 44.0}, "gemma3": {"5e-6": 30.0, "1e-5": 27.0}},
    "hacpo": {"smollm2": {"5e-6": 41.0, "1e-5": 40.0}, "gemma3": {"5e-6": 30.0, "1e-5": 30.0}},
    "hacpo-floor-0.5": {"smollm2": {"5e-6": 42.0}, "gemma3": {"5e-6": 30.0}},
    "hacpo-floor-0.2": {"smollm2": {"5e-6": 41.0}, "gemma3": {"5e-6": 33.0}},
}


def test_the_second_round_goes_on_in_the_better_direction_of_each_agent() -> None:
    """Under naive, SmolLM2 gains 4 at the higher rate and Gemma loses 3. Under hacpo, both together
    lose 0.5. Floor 0.5 has a mean of 42 and 30 = 36, floor 0.2 of 41 and 33 = 37."""
    floor, naive, hacpo = second(FOUND)
    assert floor == "hacpo-floor-0.2-rate-1e-5"
    assert naive == "naive-rate-2e-5-and-2.5e-6"
    assert hacpo == "hacpo-rate-2.5e-6"


def test_every_agent_has_its_best_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(FOUND) == {
        "naive": {"smollm2": "1e-5", "gemma3": "5e-6"},
        "hacpo": {"smollm2": "5e-6", "gemma3": "5e-6"},
        "hacpo-floor-0.2": {"smollm2": "5e-6", "gemma3": "5e-6"},
    }
    print_choice(FOUND)
    assert (
        "naive agents.smollm2.learning_rate=1e-5 agents.gemma3.learning_rate=5e-6"
        in capsys.readouterr().out.splitlines()
    )


def test_the_first_round_has_two_rates_and_the_floors() -> None:
    names = first()
    assert len(names) == 13  # five rules at two rates, three floors
    assert "overlap-rate-1e-5" in names and "overlap-rate-2e-5" not in names
    assert "hacpo-floor-0.2-rate-5e-6" in names and "hacpo-floor-0.2-rate-1e-5" not in names
