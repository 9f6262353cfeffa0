"""What a claimed log-probability can reach under each algorithm (the bounds of docs/security.md)."""

from math import exp, log

import pytest
from by_hand import batch_of

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.algorithms.functional import MAX_LOG_RATIO
from hacrl.types import Update

MINE = -1.0  # the learner's mean log-probability of the text
CLAIMS = [0.0, -0.5, -0.9, -0.999, -1.0, -1.001, -1.1, -1.2, -2.0, -5.0, -20.0, -50.0, -100.0]
FLOOR = 0.8


def strengths(name: str, advantage: float, weight: float = 1.0) -> list[float]:
    """The gradient of a peer's sample by its mean log-probability, per unit of advantage, over all
    claims. Its sign is that of learning in the right direction."""
    found = []
    for claim in CLAIMS:
        algorithm = make_algorithm(make_settings(name), (0.0, 1.0))
        batch = batch_of(
            [[MINE]], [False], behaviour=[claim], advantage=[advantage], weight=[weight]
        )
        loss = algorithm.loss(batch, Update(0, FLOOR, "peers", ())).loss
        loss.backward()
        found.append(-batch.logprobs_BT.grad.item() / advantage)
    return found


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_hacpo_weighs_within_the_interval_and_not_outside(advantage: float) -> None:
    """s in [0.8, 1]: w s^2, at most w <= 10 and at least 0.64 w. Outside: 0."""
    for w in (0.1, 1.0, 10.0):
        for claim, found in zip(CLAIMS, strengths("hacpo", advantage, w), strict=True):
            s = exp(MINE - claim)
            inside = FLOOR <= s <= 1
            assert found == pytest.approx(w * s**2 if inside else 0.0)
            assert not inside or 0.64 * w <= found <= w


def test_naive_bounds_successes_and_not_failures() -> None:
    assert max(strengths("naive", 1.0)) <= 1 + 4e-4
    worst = max(strengths("naive", -1.0))
    assert log(worst) == pytest.approx(19.0)  # a claim of -20; from e^20 on there is no gradient
    assert worst < exp(MAX_LOG_RATIO)


def test_overlap_takes_the_weight_of_credit_which_is_at_most_one() -> None:
    assert strengths("overlap", 1.0, 0.3) == pytest.approx([0.3] * len(CLAIMS))
