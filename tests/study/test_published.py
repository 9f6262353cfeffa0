"""docs/results/equal-updates.md: the kept runs fit what the page says about them."""

from publish_results import report


def test_all_arms_of_equal_updates_make_as_many_updates() -> None:
    """Four rules and five agents of pairs, with GSPO alone at 1, 2 and 4 times the rollouts."""
    _, results = report("equal-updates")
    assert {row.updates for row in results.rows} == {20}
    rates = [row.exchange for row in results.rows if row.exchange]
    assert len(rates) == 20
    assert {(rate.n, rate.multiples, rate.seeds) for rate in rates} == {(2, (1, 2, 4), 10)}
