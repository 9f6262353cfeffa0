"""SAPO by hand: which groups are taken, and peers' texts in GRPO's loss."""

from functools import partial
from math import log

import pytest
from by_hand import batch_of, gradient, groups_of, rule, seen_by, step_of

from hacrl.types import Update

MIXED = Update(0, 0.0, "mixed", ("q", "r"))
sapo = partial(rule, "sapo")

FOUR = {
    "q1": {"a": "10", "b": "10", "c": "00"},
    "q2": {"a": "00", "b": "01", "c": "11"},
    "q3": {"a": "11", "b": "11", "c": "00"},
    "q4": {"a": "01", "b": "tt", "c": "10"},
}
"""Peers' groups with different rewards: b's of q1 and q2, c's of q4."""


def taken(step, **settings):
    return {(s.problem_id, s.source) for s in sapo(**settings).credit(step)}


@pytest.mark.parametrize(
    ("external", "own", "peers"), [(0.0, 4, 0), (0.25, 3, 1), (0.5, 2, 2), (1.0, 1, 3)]
)
def test_how_many_groups_are_taken(external: float, own: int, peers: int) -> None:
    """Four prompts: I + J = 4. Peers have three groups with different rewards, so J is at most 3."""
    found = taken(step_of(FOUR), external=external)
    theirs = {key for key in found if key[1] != "a"}
    assert (len(found) - len(theirs), len(theirs)) == (own, peers)
    assert theirs <= {("q1", "b"), ("q2", "b"), ("q4", "c")}


def test_the_choice_does_not_depend_on_order_and_survives_a_second_credit() -> None:
    """`credit` runs again on the samples that it kept, once they are scored."""
    groups = groups_of({f"q{i}": {"a": "10", "b": "10", "c": "01", "d": "11"} for i in range(40)})
    seen = seen_by(groups, "a")
    first = sapo().credit(step_of(groups, seen))
    assert sapo().credit(step_of(groups, first)) == first
    found = taken(step_of(groups, seen[::-1]))
    assert found == taken(step_of(groups, seen))
    counts = [sum(agent == name for _, agent in found) for name in "abcd"]
    assert counts[0] == 20 and counts[1] + counts[2] == 20 and counts[3] == 0
    assert 4 < counts[1] < 16  # no peer is preferred
    others = {key for key in taken(step_of(groups, learner="b")) if key[1] == "c"}
    assert others != {key for key in found if key[1] == "c"}  # every learner draws for itself


def test_a_group_without_samples_is_not_taken() -> None:
    """c's replies to q4 cannot be tokenised: two groups are left."""
    seen = [s for s in step_of(FOUR).samples if (s.problem_id, s.source) != ("q4", "c")]
    found = taken(step_of(groups_of(FOUR), seen), external=1.0)
    assert {key for key in found if key[1] != "a"} == {("q1", "b"), ("q2", "b")}
    assert len(found) == 4


def test_a_peers_advantage_is_over_its_own_group() -> None:
    """b: 1, 0, 0. Mean 1/3, deviation sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3)."""
    credited = sapo(external=1.0).credit(step_of({"q": {"a": "11", "b": "100"}}))
    r = 3**0.5
    assert [s.advantage for s in credited] == pytest.approx([2 / 3 * r, -r / 3, -r / 3], abs=1e-5)
    assert {(s.source, s.weight) for s in credited} == {("b", 1.0)}


def test_loss_by_hand() -> None:
    """Own row: ratios 1.1 and 1, A = 2: J = 2.2 + 2. Peer, old log-probability of the learner -2, now
    ratio 0.9, A = -1: J = -0.9. Peer, ratio 1.5 above the clip 1.28, A = 1: J = 1.28 without gradient.
    Four tokens: loss = -(4.2 - 0.9 + 1.28) / 4. The source's log-probability has no effect."""
    nan = float("nan")
    b = batch_of(
        [[-1 + log(1.1), -1.0], [-2 + log(0.9), 0.0], [-3 + log(1.5), 0.0]],
        [True, False, False],
        mask=[[1, 1], [1, 0], [1, 0]],
        old=[[-1.0, -1.0], [-2.0, 0.0], [-3.0, 0.0]],
        advantage=[2.0, -1.0, 1.0],
        behaviour=[-1.0, nan, -0.1],
    )
    output = sapo().loss(b, MIXED)
    assert output.loss.item() == pytest.approx(-(4.2 - 0.9 + 1.28) / 4)
    wanted = [[-2.2 / 4, -2 / 4], [0.9 / 4, 0.0], [0.0, 0.0]]
    assert gradient(output, b) == [pytest.approx(row) for row in wanted]
    assert output.weight_B.tolist() == pytest.approx([1.05, 0.9, 0.0])
    assert output.ratio_B.isfinite().all()
