"""Overlap by hand: the ratio of whole texts, the baseline, and which successes are followed."""

from dataclasses import replace
from functools import partial
from math import exp, log, sqrt

import pytest
from by_hand import batch_of, gradient, groups_of, rule, seen_by, step_of

from hacrl.algorithms.overlap import level
from hacrl.types import Update

MIXED = Update(0, 0.8, "mixed", ("q",))


overlap = partial(rule, "overlap")


def scored(samples, *ratios: float):
    """Peers' samples, one token each and of log -1 to their authors, as likely to the learner as the
    ratios say (the last one for all that follow)."""
    left = list(ratios)
    found = []
    for s in samples:
        if not s.is_own:
            rho = left.pop(0) if len(left) > 1 else left[0]
            s = replace(s, old_logprobs=(-1.0 + log(rho),))
        found.append(s)
    return found


def credit(replies, *ratios: float):
    groups = groups_of(replies)
    return overlap().credit(step_of(groups, scored(seen_by(groups, "a"), *ratios)))


def test_a_weaker_peer_lowers_the_baseline_and_the_advantages_sum_to_zero() -> None:
    """a: 1, 0. b: 0, 0, each half as likely to a. Weighted mean of all: 1 / 3, below a's own 1/2.
    Squares 4/9 + 1/9 + 2 * 1/2 * 1/9 = 2/3 over 3 - 1: the deviation is sqrt(1/3)."""
    credited = credit({"q": {"a": "10", "b": "00"}}, 0.5)
    third = 1 / sqrt(3)
    assert [s.advantage for s in credited] == pytest.approx(
        [2 * third, -third, -third, -third], abs=1e-5
    )
    assert [s.weight for s in credited] == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert sum(s.weight * s.advantage for s in credited) == pytest.approx(0.0, abs=1e-9)


def test_the_ratio_of_successes_has_its_own_length() -> None:
    """Two tokens, each half as likely to a: rho = 1/4. With success_tokens 1 a right reply has
    rho^(1/2) = 1/2, a wrong one 1/4; with 0 a right one has 1; by default both have 1/4. A peer that is
    not trusted has its ratio."""
    half = -0.5 - log(2)  # the author's two tokens have -0.5 each
    groups = groups_of({"q": {"a": "10", "b": "10"}})
    twice = [
        s
        if s.is_own
        else replace(s, token_ids=(1, 2, 3), loss_mask=(0, 1, 1), old_logprobs=(half, half))
        for s in seen_by(groups, "a")
    ]
    step = step_of(groups, twice)
    for tokens, weights in ((1, [0.5, 0.25]), (0, [1, 0.25]), (None, [0.25, 0.25])):
        credited = overlap(success_tokens=tokens).credit(step)
        assert [s.weight for s in credited if not s.is_own] == pytest.approx(weights)
    doubted = overlap(success_tokens=0).credit(replace(step, trusted=[]))
    assert [s.weight for s in doubted if not s.is_own] == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("v", [0.01, 0.0001])
def test_a_smallest_deviation_makes_a_small_weight_count_by_itself(v: float) -> None:
    """a: eight right replies. b: a failure of weight v. b = 8 / (8 + v), squares are
    8 (v / (8 + v))^2 + v (8 / (8 + v))^2 = 8 v / (8 + v), over 7 + v. Of the failure v |A| is then
    v b / deviation = sqrt(8 v (7 + v) / (8 + v)): about sqrt(7 v), 26 times v for v = 0.01. With a bound
    of 1/sqrt(8) it is sqrt(8) v b. The own advantages have the same sum, so that all sum to zero."""
    groups = groups_of({"q": {"a": "1" * 8, "b": "0"}})
    step = step_of(groups, scored(seen_by(groups, "a"), v))
    wanted = {None: sqrt(8 * v * (7 + v) / (8 + v)), 8**-0.5: sqrt(8) * v * 8 / (8 + v)}
    for smallest, push in wanted.items():
        *own, failure = overlap(smallest_deviation=smallest).credit(step)
        assert failure.weight * failure.advantage == pytest.approx(-push, rel=1e-3)
        assert sum(s.advantage for s in own) == pytest.approx(push, rel=1e-3)


def test_a_smallest_deviation_leaves_own_groups_and_equal_rewards() -> None:
    """One success among eight own replies has a deviation of exactly 1/sqrt(8); a peer of no weight
    leaves it. Equal rewards keep advantage 0."""
    assert level([1] + [0] * 7, [(0, 0.0)], 8**-0.5) == pytest.approx((1 / 8, 8**-0.5))
    assert level([1, 0], [], 0.1)[1] == pytest.approx(sqrt(1 / 2))
    assert level([1, 1], [(1, 0.5)], 0.35) == (1.0, 0.0)


def test_a_better_peer_leaves_the_own_mean() -> None:
    """a: 1, 0. b: 1, 1, as likely to a. The mean of all, 3/4, lies above a's own 1/2, which stays.
    Four squares of 1/4 over 4 - 1: sqrt(1/3), and 1/2 over it."""
    credited = credit({"q": {"a": "10", "b": "11"}}, 1.0)
    a = 0.5 * sqrt(3)
    assert [s.advantage for s in credited] == pytest.approx([a, -a, a, a], abs=1e-5)


def test_the_example_of_level() -> None:
    b, spread = level([1, 0], [(0, 0.5)])
    assert b == pytest.approx(0.4)
    assert spread == pytest.approx(sqrt((0.36 + 0.16 + 0.5 * 0.16) / 1.5))
    assert level([1, 1], [(1, 0.5)]) == (1.0, 0.0)  # nothing differs
    assert level([0], []) == (0.0, 0.0)
    assert level([1], [(0, 1e-300)]) == (1.0, 0.0)  # one reply and next to nothing
    assert level([0.1] * 2, [(0.1, 0.3)])[1] == 0.0  # their mean is not 0.1 to the last digit
    assert level([0.7] * 3, [(0.7, 0.9), (0.7, 0.2)])[1] == 0.0


def test_peers_give_the_signal_where_own_rewards_are_equal() -> None:
    """q: a always right; b's failure, half as likely to a, lowers the baseline to 3 / 3.5. r: no one
    differs."""
    credited = credit({"q": {"a": "11", "b": "10"}, "r": {"a": "11", "b": "11"}}, 1, 0.5, 1)
    b = 3 / 3.5
    spread = sqrt((3 * (1 - b) ** 2 + 0.5 * b**2) / 2.5)
    right, wrong = (1 - b) / spread, -b / spread
    assert [s.advantage for s in credited] == pytest.approx(
        [right, right, right, wrong, 0, 0, 0, 0], abs=1e-4
    )


def test_the_ratio_is_of_whole_texts() -> None:
    """b wrote two tokens of mean log 0.5: its text has 1/4. In a's tokenizer it has four of log 0.5:
    1/16. rho = 1/4 though the average tokens are alike."""
    groups = groups_of({"q": {"a": "10", "b": "01"}})
    theirs = [
        replace(t, num_tokens=2, mean_logprob=log(0.5)) if t.agent == "b" else t
        for t in groups[0].trajectories
    ]
    groups = [replace(groups[0], trajectories=tuple(theirs))]
    seen = [
        s
        if s.is_own
        else replace(s, behaviour=log(0.5), loss_mask=(0, 1, 1, 1, 1), old_logprobs=(log(0.5),) * 4)
        for s in seen_by(groups, "a")
    ]

    def v(**settings) -> float:
        return overlap(**settings).credit(step_of(groups, seen))[2].weight

    assert v() == pytest.approx(0.25)
    assert v(power=0.5) == pytest.approx(0.5)
    assert v(power=0.0) == 1.0
    assert v(ratio_tokens=2) == pytest.approx(0.5)  # as if it had two tokens


def test_loss_by_hand() -> None:
    """Two tokens a row, four rows, two of them own: sums are over 2.

    Peer, A = -2, v = 1/2: J = 1/2 * -2 * m: each token -(1/2)(-2)/2/2 = 1/4.
    Peer, A = 1, v = 1: -1/4 each. Own, A = 1, s = 1: -1/4. Own, A = 1, s = e^0.1, above the clip: 0."""
    m = -1.0
    b = batch_of(
        [[m, m]] * 4,
        [False, False, True, True],
        behaviour=[m - log(0.5), m, m, m - 0.1],
        advantage=[-2.0, 1.0, 1.0, 1.0],
        weight=[0.5, 1.0, 1.0, 1.0],
    )
    output = overlap().loss(b, MIXED)
    wanted = [1 / 4, -1 / 4, -1 / 4, 0.0]
    assert gradient(output, b) == [pytest.approx([g, g], abs=1e-9) for g in wanted]
    assert output.ratio_B.tolist() == pytest.approx([0.5, 1.0, 1.0, exp(0.1)])
    assert output.weight_B.tolist() == pytest.approx([0.5, 1.0, 1.0, 0.0])


def test_an_update_of_peers_alone_is_a_mean_over_them() -> None:
    """order = "own_first" has such: two rows, A = 1 and -1, v = 1 and 1/2, one token: -1/2 and 1/4."""
    b = batch_of([[-1.0], [-1.0]], [False, False], advantage=[1.0, -1.0], weight=[1.0, 0.5])
    output = overlap().loss(b, MIXED)
    assert [g for (g,) in gradient(output, b)] == pytest.approx([-1 / 2, 1 / 4])
    assert output.weight_B.tolist() == pytest.approx([1.0, 0.5])


def test_failures_of_no_weight_beside_own_successes_say_nothing() -> None:
    """The weight is 0 in floating point, and so is the deviation: no advantage, and nothing infinite."""
    groups = groups_of({"q": {"a": "11", "b": "00"}})
    seen = [s if s.is_own else replace(s, old_logprobs=(-1e4,)) for s in seen_by(groups, "a")]
    credited = overlap().credit(step_of(groups, seen))
    assert [(s.advantage, s.weight) for s in credited] == [(0, 1), (0, 1), (0, 0), (0, 0)]


def test_a_success_is_followed_only_where_all_own_replies_failed() -> None:
    """q: a failed, a reply that could not be judged beside. b's success has v = 1, however unlikely
    to a; its failure has not. r: one success of a's own is enough, though b is better by far."""
    groups = groups_of({"q": {"a": "0ut", "b": "10"}, "r": {"a": "100", "b": "11"}})

    def weights(trusted=None, **settings) -> list[float]:
        seen = scored(seen_by(groups, "a"), 0.02)
        step = replace(step_of(groups, seen), trusted=trusted)
        return [s.weight for s in overlap(**settings).credit(step) if not s.is_own]

    assert weights() == weights(["b"]) == pytest.approx([1, 0.02, 0.02, 0.02])
    assert weights(follow=False) == pytest.approx([0.02] * 4)
    assert weights([]) == weights(["c"]) == pytest.approx([0.02] * 4)  # b is not trusted


def test_a_truncated_reply_and_an_unknown_level_take_no_part() -> None:
    groups = groups_of({"q": {"a": "10", "b": "11"}, "r": {"a": "t", "b": "10"}})
    seen = [
        replace(s, truncated=True) if (s.source, s.index) == ("b", 1) else s
        for s in scored(seen_by(groups, "a"), 1.0)
    ]
    credited = overlap().credit(step_of(groups, seen))
    found = [(s.problem_id, s.source, s.index) for s in credited]
    assert found == [("q", "a", 0), ("q", "a", 1), ("q", "b", 0)]
