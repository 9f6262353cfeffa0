from itertools import combinations
from math import inf, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.errors import UserError
from hacrl.statistics import (
    Z95,
    bootstrap,
    compare_paired,
    crossed_bootstrap,
    estimate,
    estimate_rewards,
    estimate_scores,
    holm,
    majority,
    pass_at_k,
    t_interval,
    t_quantile,
    t_test,
    wilson,
)


def test_normal_interval() -> None:
    """0, 0, 1, 1: mean 1/2, variance (4 x 1/4) / 3 = 1/3, half width z sqrt(1/3 / 4) = z / sqrt(12)."""
    found = estimate([0, 0, 1, 1])
    assert (found.mean, found.count, found.method) == (0.5, 4, "normal")
    assert found.high - found.mean == pytest.approx(Z95 / sqrt(12))
    assert found.mean - found.low == pytest.approx(Z95 / sqrt(12))
    assert (estimate([0.3]).low, estimate([0.3]).high) == (0.3, 0.3)


def test_wilson_by_hand() -> None:
    """1 of 10 with z = 1.959964, z^2 = 3.841459: centre 0.1 + 3.841459 / 20 = 0.292073; half
    1.959964 sqrt(0.009 + 3.841459 / 400) = 1.959964 sqrt(0.018604) = 0.267332; scale 1.384146:
    [0.017876, 0.404150]. 0 of 30: from 0 to z^2 / (n + z^2) = 0.113514; 30 of 30 mirrors it."""
    found = wilson(1, 10)
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.017876, 0.404150), abs=1e-5)
    none, every = wilson(0, 30), wilson(30, 30)
    assert none.low == 0.0 and none.high == pytest.approx(0.113514, abs=1e-6)
    assert every.high == 1.0 and every.low == pytest.approx(1 - 0.113514, abs=1e-6)


def test_the_interval_fits_the_scores() -> None:
    assert estimate_scores([0.0, 1.0, 1.0]).method == "wilson"
    assert estimate_scores([0.0] * 200).method == "wilson"
    assert estimate_scores([0.25, 1.0, 0.0]).method == "bootstrap"
    assert estimate_scores([0.25] + [0.0] * 99).method == "normal"


def test_bootstrap_is_fixed_close_to_normal_and_in_range() -> None:
    """60 values between 0 and 1: the half width is near the normal one's, and two calls agree. 29 zeros
    and one 0.9: the normal interval would begin below 0."""
    values = [(i * 7 % 11) / 10 for i in range(60)]
    found, normal = bootstrap(values), estimate(values)
    assert found == bootstrap(values)
    assert found.mean == normal.mean
    assert (found.low, found.high) == pytest.approx((normal.low, normal.high), abs=0.01)
    values = [0.0] * 29 + [0.9]
    assert estimate(values).low < 0
    assert bootstrap(values).low == 0.0


def test_rewards_that_are_all_equal_have_an_interval() -> None:
    """Wilson with z^2 = 3.8415: 0 of 100 has the upper end z^2 / (100 + z^2), 100 of 100 mirrors it."""
    low, high = estimate_rewards([0.0] * 100), estimate_rewards([1.0] * 100)
    assert (low.mean, low.low, low.high) == pytest.approx((0, 0, 3.8415 / 103.8415), abs=1e-5)
    assert (high.mean, high.low, high.high) == pytest.approx((1, 100 / 103.8415, 1), abs=1e-5)
    assert estimate_rewards([0.0, 0.5] * 50) == estimate([0.0, 0.5] * 50)


def test_paired_differences() -> None:
    """Common: p, q. Differences 1 and 0: mean 1/2 over 2 problems, and the resampled means 0, 1/2, 1
    with chances 1/4, 1/2, 1/4 give the interval [0, 1]. 200 problems, 50 gained and 150 equal: mean
    1/4, and the normal interval of the differences."""
    found = compare_paired({"p": 0.0, "q": 1.0, "s": 1.0}, {"q": 1.0, "p": 1.0, "r": 0.0})
    assert (found.mean, found.low, found.high, found.count) == (0.5, 0.0, 1.0, 2)
    a = {f"p{i}": 0.0 for i in range(200)}
    b = {f"p{i}": float(i < 50) for i in range(200)}
    found = compare_paired(a, b)
    assert found.method == "normal" and found.mean == 0.25 and found.count == 200
    assert found.high - 0.25 == pytest.approx(Z95 * sqrt(0.25 * 0.75 * 200 / 199 / 200))
    assert compare_paired(b, a).mean == -0.25
    with pytest.raises(UserError, match="no problem in common"):
        compare_paired({"p": 1.0}, {"q": 1.0})


@settings(deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_fraction_of_subsets(attempts: int, data: st.DataObject) -> None:
    """Counted over every subset of k attempts."""
    right = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    subsets = list(combinations([1] * right + [0] * (attempts - right), k))
    expected = sum(any(s) for s in subsets) / len(subsets)
    assert pass_at_k(attempts, right, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match=f"at least {attempts + 1}"):
        pass_at_k(attempts, right, attempts + 1)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("7", 0.0), ("8", 1.0), (" 8", 1.0)], 1.0),  # white space is ignored
        ([("7", 0.0), ("8", 1.0), ("8", 1.0), ("7", 0.0)], 0.0),  # a tie: the first seen
        ([("8", 1.0), ("7", 0.0), ("7", 0.0), ("8", 1.0)], 1.0),
        ([(None, 0.0), (None, 0.0), ("8", 1.0)], 1.0),  # None is no vote
        ([(None, 0.0), (None, 0.0)], 0.0),
    ],
)
def test_majority(votes: list[tuple[str | None, float]], expected: float) -> None:
    assert majority(votes) == expected


# ---------------------------------------------------------------- a few seeds


def test_interval_over_three_seeds() -> None:
    """0.1, 0.2, 0.3: deviation 0.1, so half is 4.302653 x 0.1 / sqrt(3) = 0.248414. For the test
    t = 0.2 / (0.1 / sqrt(3)) = sqrt(12), and 1 - sqrt(12) / sqrt(2 + 12) = 0.074180. One seed has no
    finite interval."""
    assert t_quantile(3) == pytest.approx(3.182, abs=1e-3)
    found = t_interval([0.1, 0.2, 0.3])
    assert (found.mean, found.low, found.high) == pytest.approx(
        (0.2, -0.048414, 0.448414), abs=1e-6
    )
    assert (found.count, found.method) == (3, "t")
    assert t_test([0.1, 0.2, 0.3]) == pytest.approx(0.074180, abs=1e-6)
    found = t_interval([0.3])
    assert (found.mean, found.low, found.high) == (0.3, -inf, inf)
    assert (t_test([0.3]), t_test([0.0, 0.0]), t_test([0.1, 0.1])) == (1.0, 1.0, 0.0)


def test_crossed_bootstrap() -> None:
    """Two seeds, one problem, 0 and 1: resampled means 0, 1/2, 1 with chances 1/4, 1/2, 1/4, so
    [0, 1]; the same for one seed and two problems. A table of equal values has no width.

    Entry a_i + b_j: the mean's variance under resampling is var(a) / S + var(b) / P, with the
    variances of the values themselves (divided by S and P). a in 0 and 0.2 (variance 0.01), 40
    seeds; b in 0 and 0.4 (variance 0.04), 50 problems: 0.00025 + 0.0008, half 1.96 sqrt = 0.0635.
    Without the problems it would be 0.031, without the seeds 0.055."""
    for table in ([[0.0], [1.0]], [[0.0, 1.0]]):
        found = crossed_bootstrap(table)
        assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
    equal = crossed_bootstrap([[0.5, 0.5]] * 3)
    assert equal.low == equal.high == 0.5
    table = [[0.2 * (i % 2) + 0.4 * (j % 2) for j in range(50)] for i in range(40)]
    found = crossed_bootstrap(table)
    assert found == crossed_bootstrap(table)
    assert found.mean == pytest.approx(0.3)
    assert (found.high - found.low) / 2 == pytest.approx(0.0635, abs=0.003)


def test_holm_by_hand() -> None:
    """0.01 x 3 = 0.03; 0.03 x 2 = 0.06; 0.04 x 1 = 0.04, but never less than the one before."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []
