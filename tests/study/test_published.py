"""docs/results/equal-updates.md: the kept runs fit what the page says about them."""

import pytest
from publish_results import report


@pytest.mark.parametrize(
    ("suite", "size", "cases"),
    [("equal-updates", 2, 20), ("equal-updates-three", 3, 12), ("equal-updates-four", 4, 12)],
)
def test_all_arms_of_equal_updates_make_as_many_updates(suite: str, size: int, cases: int) -> None:
    """Four rules and the agents of the teams, with GSPO alone at 1, 2 and 4 times the rollouts."""
    _, results = report(suite)
    assert {row.updates for row in results.rows} == {10 * size}
    rates = [row.exchange for row in results.rows if row.exchange]
    assert len(rates) == cases
    assert {(rate.n, rate.multiples, rate.seeds) for rate in rates} == {(size, (1, 2, 4), 10)}
