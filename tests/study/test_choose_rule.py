"""scripts/choose_rule.py: the criterion by hand."""

from choose_rule import choose, gaps

GRID = {"open-level": 1, "open-level-first": 2, "open-wins": 3}
GRID |= {"right-level": 0, "right-level-first": 6, "right-wins": 1}


def test_the_gap_is_to_the_better_of_naive_and_overlap() -> None:
    after = {"naive": {"a": 50, "b": 60}, "overlap": {"a": 52, "b": 59}, "x": {"a": 53, "b": 58}}
    assert gaps(after)["x"] == {"a": 1, "b": -2}
    assert gaps(after)["naive"] == {"a": -2, "b": 0}


def test_settings_are_chosen_by_all_their_arms_and_a_tie_by_the_worst_agent() -> None:
    """open: (1 + 2 + 3) / 3 = 2; right: 7/3. level 0.5, level-first 4, wins 2. So right-level-first, 6.
    overlap-first has 5.6 and the better worst agent: within 0.5 points it wins; with 5.4 it does not."""

    def chosen(first: float) -> tuple[str, dict[str, float]]:
        scores = GRID | {"overlap-open": 0, "hacpo-open": 0}
        gap = {arm: {"a": s + 2, "b": s - 2} for arm, s in scores.items()}
        return choose(gap | {"overlap-first": {"a": first, "b": first}})

    arm, settings = chosen(5.4)
    assert arm == "right-level-first"
    expected = {"open": 2, "right": 7 / 3, "level": 0.5, "level-first": 4, "wins": 2}
    assert settings == expected
    assert chosen(5.6)[0] == "overlap-first"
