"""GRAFT by hand: the exchange of groups, their advantages and weights."""

from dataclasses import replace
from functools import partial
from math import exp, log, sqrt

import pytest
from by_hand import batch_of, gradient, groups_of, rule, seen_by, step_of

from hacrl.algorithms.graft import candidates, exchange
from hacrl.types import Sample, Update

UPDATE = Update(0, 0.8, "mixed", ("q",))


graft = partial(rule, "graft")


# ---------------------------------------------------------------- the exchange


def test_candidates_are_failed_here_and_mixed_there() -> None:
    """q1 counts with b's two successes. Not q2 (a solved it), q3 (b always solves it), q4 (b fails
    too), q5 (nothing of a was judged), q6 (b's one judged reply is no mixed group)."""
    groups = groups_of(
        {
            "q1": {"a": "000", "b": "110"},
            "q2": {"a": "100", "b": "110"},
            "q3": {"a": "000", "b": "111"},
            "q4": {"a": "0u0", "b": "000"},
            "q5": {"a": "ttt", "b": "100"},
            "q6": {"a": "000", "b": "1tt"},
        }
    )
    assert candidates(groups, "a", "b") == {"q1": 2}
    assert candidates(groups, "b", "a") == {}


def test_both_directions_exchange_the_smaller_count() -> None:
    """a could take q1 (1 success of b), q2 (3) and q3 (2); b could take q4 and q5: two each. a takes
    the two where b succeeded most."""
    replies = {
        "q1": {"a": "0000", "b": "1000"},
        "q2": {"a": "0000", "b": "1110"},
        "q3": {"a": "0000", "b": "1100"},
        "q4": {"a": "1000", "b": "0000"},
        "q5": {"a": "1000", "b": "0000"},
    }
    groups = groups_of(replies)
    assert exchange(groups, "a") == {"q2": "b", "q3": "b"}
    assert exchange(groups, "b") == {"q4": "a", "q5": "a"}
    # One candidate less for b: one for each, but q4 alone cannot tie and q2 leads.
    groups = groups_of({k: v for k, v in replies.items() if k != "q5"})
    assert exchange(groups, "a") == {"q2": "b"}
    assert exchange(groups, "b") == {"q4": "a"}
    # None for b: nothing is exchanged at all.
    groups = groups_of({k: v for k, v in replies.items() if k not in ("q4", "q5")})
    assert exchange(groups, "a") == exchange(groups, "b") == {}


def test_ties_with_the_last_one_are_kept() -> None:
    """b gives one group, but q1 and q2 have the same count, so both; q3 has less."""
    groups = groups_of(
        {
            "q1": {"a": "000", "b": "110"},
            "q2": {"a": "000", "b": "011"},
            "q3": {"a": "000", "b": "100"},
            "q4": {"a": "100", "b": "000"},
        }
    )
    assert exchange(groups, "a") == {"q1": "b", "q2": "b"}


def test_three_agents_pair_by_pair() -> None:
    """a failed q1 to q3. With b: a has q1 (1), q2 (1) and b has q4: one each, ties kept: q1, q2.
    With c: a has q1 (2), q3 (2) and c has q4 too: one each, ties kept: q1, q3. For q1 c offers more.
    b and c never exchange: neither has a candidate of the other's in both directions."""
    groups = groups_of(
        {
            "q1": {"a": "000", "b": "100", "c": "110"},
            "q2": {"a": "000", "b": "100", "c": "111"},
            "q3": {"a": "000", "b": "111", "c": "110"},
            "q4": {"a": "100", "b": "000", "c": "000"},
        }
    )
    assert exchange(groups, "a") == {"q1": "c", "q2": "b", "q3": "c"}
    assert exchange(groups, "b") == {"q4": "a"}
    assert exchange(groups, "c") == {"q4": "a"}
    tie = groups_of(
        {
            "q1": {"a": "00", "c": "10", "b": "01"},
            "q2": {"a": "10", "b": "00", "c": "00"},
        }
    )
    assert exchange(tie, "a") == {"q1": "b"}  # the same count: the first name


# ---------------------------------------------------------------- credit


def test_the_peers_group_replaces_the_failed_one() -> None:
    """b's group 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3. A = (2/3) / sqrt(1/3) and
    -(1/3) / sqrt(1/3), as b computed them: a's three failures do not count. The samples of q1 are b's
    alone; q2's and q3's are a's own (1, 0, 0 and three failures, advantage 0)."""
    groups = groups_of(
        {
            "q1": {"a": "000", "b": "100"},
            "q2": {"a": "100", "b": "000"},
            "q3": {"a": "000", "b": "000"},
        }
    )
    std = sqrt(1 / 3) + 1e-6
    up, down = 2 / 3 / std, -1 / 3 / std
    credited = graft().credit(step_of(groups))
    assert [(s.problem_id, s.source, s.index) for s in credited] == [
        *(("q1", "b", i) for i in range(3)),
        *(("q2", "a", i) for i in range(3)),
        *(("q3", "a", i) for i in range(3)),
    ]
    assert [s.advantage for s in credited] == pytest.approx(
        [up, down, down, up, down, down, 0, 0, 0], abs=1e-12
    )


def test_dropped_replies_of_the_peers_group() -> None:
    """A part of the peer's group: the rest keeps its advantages. All of it: the own group stays."""
    groups = groups_of({"q1": {"a": "000", "b": "100"}, "q2": {"a": "100", "b": "000"}})
    seen = seen_by(groups, "a")
    some = [s for s in seen if (s.problem_id, s.source) != ("q1", "b") or s.index == 2]
    kept = [s for s in graft().credit(step_of(groups, some)) if s.problem_id == "q1"]
    assert [(s.source, s.index) for s in kept] == [("b", 2)]
    assert kept[0].advantage == pytest.approx(-1 / 3 / (sqrt(1 / 3) + 1e-6), abs=1e-12)
    none = [s for s in seen if s.is_own]
    kept = [s for s in graft().credit(step_of(groups, none)) if s.problem_id == "q1"]
    assert [(s.source, s.advantage) for s in kept] == [("a", 0.0)] * 3


# ---------------------------------------------------------------- weight and loss


def scored_credit(*means: float, **settings) -> list[Sample]:
    """The second credit of a's samples of q1, taken from b, with these old mean log-probabilities on
    b's; b wrote each with -1 per token."""
    step = step_of({"q1": {"a": "0000", "b": "1000"}, "q2": {"a": "1000", "b": "0000"}})
    kept = graft(**settings).credit(step)
    old = dict(enumerate(means))
    scored = [s if s.is_own else replace(s, old_logprobs=(old[s.index],)) for s in kept]
    credited = graft(**settings).credit(replace(step, samples=scored))
    return [s for s in credited if s.problem_id == "q1"]


def test_weights_and_refusals_by_hand() -> None:
    """Old means -1.1, -0.5, -1.25, -1: s = 0.905, 1.649, 0.779 and 1. The third is at or below 0.8:
    refused, and not in the minibatch. The second is capped at 1. Advantages are those of b's whole
    group 1, 0, 0, 0: mean 1/4, std 1/2."""
    credited = scored_credit(-1.1, -0.5, -1.25, -1.0)
    assert [s.index for s in credited] == [0, 1, 3]
    assert [s.weight for s in credited] == pytest.approx([exp(-0.1), 1.0, 1.0])
    assert [s.advantage for s in credited] == pytest.approx([1.5, -0.5, -0.5], abs=1e-5)
    loose = scored_credit(-1.1, -0.5, -1.25, -1.0, threshold=0.5, cap=1.5)
    assert [s.weight for s in loose] == pytest.approx([exp(-0.1), 1.5, exp(-0.25), 1.0])
    assert scored_credit(-2.0, -2.0, -2.0, -2.0) == []  # the own group does not come back


def test_loss_by_hand() -> None:
    """Four rows of one token: the refused sample of the test above is not among them, so the mean is
    over 4 tokens, not 5. r against the old policy.

    own:      r = 1.1, A = 1, w = 1: J = 1.1
    peer 1:   w = 0.905, r = 1.1, A = 2: J = 0.905 * 2.2
    peer 2:   w = 1, r = 1, A = -1: J = -1
    peer 4:   w = 1, r = 1.5 > 1.28 with A = 1: clipped, J = 1.28, no gradient"""
    s = exp(-0.1)
    b = batch_of(
        [[-2 + log(1.1)], [-1.1 + log(1.1)], [-0.5], [-1 + log(1.5)]],
        [True, False, False, False],
        old=[[-2.0], [-1.1], [-0.5], [-1.0]],
        advantage=[1.0, 2.0, -1.0, 1.0],
        weight=[1.0, s, 1.0, 1.0],
    )
    output = graft().loss(b, UPDATE)
    assert output.loss.item() == pytest.approx(-(1.1 + s * 2.2 - 1 + 1.28) / 4, abs=1e-12)
    assert [g for (g,) in gradient(output, b)] == pytest.approx(
        [-1.1 / 4, -2.2 * s / 4, 1 / 4, 0.0], abs=1e-12
    )
    assert output.weight_B.tolist() == pytest.approx([1.1, 1.1 * s, 1.0, 0.0])
