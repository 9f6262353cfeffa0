"""xGRPO by hand: the baseline is over all agents' rewards. Its loss is GRPO's (test_alone.py)."""

from functools import partial

import pytest
from by_hand import groups_of, rule, seen_by, step_of

xgrpo = partial(rule, "xgrpo")


def credit(replies):
    groups = groups_of(replies)
    return xgrpo().credit(step_of(groups, [s for s in seen_by(groups, "a") if s.is_own]))


def test_the_baseline_is_of_all_agents() -> None:
    """a: 1, 0. b: 1, 1. Mean 3/4, squares 3/16 + 9/16 over 4 - 1: the deviation is 1/2.
    r: a is always right, and b's failure gives it a signal: mean 3/4 again.
    s: all rewards are equal. u: b's reply was not judged and does not count."""
    credited = credit(
        {
            "q": {"a": "10", "b": "11"},
            "r": {"a": "11", "b": "10"},
            "s": {"a": "00", "b": "00"},
            "u": {"a": "10", "b": "t"},
        }
    )
    half = 0.5 / 0.5**0.5
    wanted = [0.5, -1.5, 0.5, 0.5, 0, 0, half, -half]
    assert [s.advantage for s in credited] == pytest.approx(wanted, abs=1e-5)
    assert {s.weight for s in credited} == {1.0}
