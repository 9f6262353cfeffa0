"""Overlap by hand: the ratio of whole texts, by what replies are measured, who is followed."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch

from hacrl.algorithms import Step, make_algorithm, make_settings
from hacrl.algorithms.capability import Capability
from hacrl.algorithms.overlap import level
from hacrl.types import Status, Update, Verdict

MIXED = Update(0, 1, 0.8, "mixed", ("q",))
NOBODY = Capability({})


def overlap(**settings):
    return make_algorithm(make_settings("overlap", **settings))


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


def test_a_weaker_peer_is_weighed_into_the_baseline_and_nothing_is_pushed_on_the_whole(
    groups_of, seen_by
) -> None:
    """a: 1, 0. b: 0, 0, each half as likely to a. Mean of all, weighed: 1 / 3, below a's own 1/2.
    Squares 4/9 + 1/9 + 2 * 1/2 * 1/9 = 2/3 over 3 - 1: the deviation is sqrt(1/3)."""
    groups = groups_of({"q": {"a": "10", "b": "00"}})
    credited = overlap().credit(Step("a", scored(seen_by(groups, "a"), 0.5), groups, NOBODY))
    third = 1 / sqrt(3)
    assert [s.advantage for s in credited] == pytest.approx(
        [2 * third, -third, -third, -third], abs=1e-5
    )
    assert [s.weight for s in credited] == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert sum(s.weight * s.advantage for s in credited) == pytest.approx(0.0, abs=1e-9)


def test_a_better_peer_leaves_the_own_mean(groups_of, seen_by) -> None:
    """a: 1, 0. b: 1, 1, as likely to a. The mean of all, 3/4, lies above a's own 1/2, which stays.
    Four squares of 1/4 over 4 - 1: sqrt(1/3), and 1/2 over it."""
    groups = groups_of({"q": {"a": "10", "b": "11"}})
    credited = overlap().credit(Step("a", scored(seen_by(groups, "a"), 1.0), groups, NOBODY))
    a = 0.5 * sqrt(3)
    assert [s.advantage for s in credited] == pytest.approx([a, -a, a, a], abs=1e-5)


def test_the_example_of_level() -> None:
    b, spread = level([1, 0], [(0, 0.5)])
    assert b == pytest.approx(0.4)
    assert spread == pytest.approx(sqrt((0.36 + 0.16 + 0.5 * 0.16) / 1.5))
    assert level([1, 1], [(1, 0.5)]) == (1.0, 0.0)  # nothing differs
    assert level([0], []) == (0.0, 0.0)
    assert level([1], [(0, 1e-300)]) == (1.0, 0.0)  # one reply and next to nothing


def test_equal_rewards_say_nothing_however_they_round() -> None:
    """Three times 0.1 over 3 is not 0.1 to the last digit; the deviation is 0 all the same."""
    assert level([0.1, 0.1], [(0.1, 0.3)])[1] == 0.0
    assert level([0.7] * 3, [(0.7, 0.9), (0.7, 0.2)])[1] == 0.0


def test_where_the_own_group_is_uniform_the_peers_speak(groups_of, seen_by) -> None:
    """q: a always right; b's failure, half as likely to a, lowers the baseline to 3 / 3.5. r: no one
    differs."""
    groups = groups_of({"q": {"a": "11", "b": "10"}, "r": {"a": "11", "b": "11"}})
    credited = overlap().credit(Step("a", scored(seen_by(groups, "a"), 1, 0.5, 1), groups, NOBODY))
    b = 3 / 3.5
    spread = sqrt((3 * (1 - b) ** 2 + 0.5 * b**2) / 2.5)
    right, wrong = (1 - b) / spread, -b / spread
    assert [s.advantage for s in credited] == pytest.approx(
        [right, right, right, wrong, 0, 0, 0, 0], abs=1e-4
    )


def test_the_ratio_is_of_whole_texts(groups_of, seen_by) -> None:
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
        return overlap(**settings).credit(Step("a", seen, groups, NOBODY))[2].weight

    assert v() == pytest.approx(0.25)
    assert v(power=0.5) == pytest.approx(0.5)
    assert v(power=0.0) == 1.0
    assert v(ratio_tokens=2) == pytest.approx(0.5)  # as if it had two tokens


def test_no_weight_lies_above_an_own_samples(groups_of, seen_by) -> None:
    groups = groups_of({"q": {"a": "10", "b": "10"}})
    credited = overlap().credit(Step("a", scored(seen_by(groups, "a"), 1e9), groups, NOBODY))
    assert [s.weight for s in credited] == [1.0] * 4


def test_loss_by_hand(batch_of) -> None:
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
    (gradient,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    wanted = [1 / 4, -1 / 4, -1 / 4, 0.0]
    assert gradient.tolist() == [pytest.approx([g, g], abs=1e-9) for g in wanted]
    assert output.ratio_B.tolist() == pytest.approx([0.5, 1.0, 1.0, exp(0.1)])
    assert output.used_B.tolist() == [True, True, True, False]


def test_an_update_of_peers_alone_is_a_mean_over_them(batch_of) -> None:
    """order = "own_first" has such: two rows, A = 1 and -1, v = 1 and 1/2, one token: -1/2 and 1/4."""
    b = batch_of([[-1.0], [-1.0]], [False, False], advantage=[1.0, -1.0], weight=[1.0, 0.5])
    output = overlap().loss(b, MIXED)
    (gradient,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    assert gradient.flatten().tolist() == pytest.approx([-1 / 2, 1 / 4])
    assert output.used_B.tolist() == [True, True]


def test_the_kl_term_is_of_own_samples(batch_of) -> None:
    """r = pi_start / pi = 2 for both: k3 = 2 - log 2 - 1, of the one own row. Its gradient by the
    log-probability is 1 - r = -1, times beta."""
    given = {"behaviour": [-1.0, -1.0], "advantage": [0.0, 0.0], "weight": [1.0, 0.5]}
    b = batch_of([[-1.0], [-1.0]], [True, False], ref=[[-1.0 + log(2)]] * 2, **given)
    output = overlap(beta=0.1).loss(b, MIXED)
    (gradient,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    assert output.kl == pytest.approx(1 - log(2))
    assert gradient.flatten().tolist() == pytest.approx([-0.1, 0.0])


def test_a_peer_of_no_weight_leaves_gspo_its_step(groups_of, seen_by, batch_of) -> None:
    """What the learner would never write changes neither baseline nor the size of the gradient."""
    groups = groups_of({"q": {"a": "100", "b": "000"}})
    credited = overlap().credit(Step("a", scored(seen_by(groups, "a"), 1e-300), groups, NOBODY))
    gspo = make_algorithm(make_settings("gspo"))
    alone = gspo.credit(Step("a", seen_by(groups, "a")[:3], groups, NOBODY))
    assert [s.advantage for s in credited[:3]] == pytest.approx([s.advantage for s in alone])

    def gradient(rule, samples):
        b = batch_of(
            [[-1.0]] * len(samples),
            [s.is_own for s in samples],
            behaviour=[-1.0] * len(samples),
            advantage=[s.advantage for s in samples],
            weight=[s.weight for s in samples],
        )
        return torch.autograd.grad(rule.loss(b, MIXED).loss, b.logprobs_BT)[0].flatten().tolist()

    both = gradient(overlap(), credited)
    assert both == pytest.approx([*gradient(gspo, alone), 0.0, 0.0, 0.0], abs=1e-12)


def test_failures_of_no_weight_beside_own_successes_say_nothing(groups_of, seen_by) -> None:
    """The weight is 0 in floating point, and so is the deviation: no advantage, and nothing infinite."""
    groups = groups_of({"q": {"a": "11", "b": "00"}})
    seen = [s if s.is_own else replace(s, old_logprobs=(-1e4,)) for s in seen_by(groups, "a")]
    credited = overlap().credit(Step("a", seen, groups, NOBODY))
    assert [(s.advantage, s.weight) for s in credited] == [(0, 1), (0, 1), (0, 0), (0, 0)]


def test_a_success_is_followed_only_where_all_own_replies_failed(groups_of, seen_by) -> None:
    """q: a failed, a reply that could not be judged beside. b's success has v = 1, however unlikely
    to a; its failure has not. r: one success of a's own is enough, though b is better by far."""
    groups = groups_of({"q": {"a": "0ut", "b": "10"}, "r": {"a": "100", "b": "11"}})

    def weights(**settings) -> list[float]:
        seen = scored(seen_by(groups, "a"), 0.02)
        credited = overlap(**settings).credit(Step("a", seen, groups, NOBODY))
        return [s.weight for s in credited if not s.is_own]

    assert weights() == pytest.approx([1, 0.02, 0.02, 0.02])
    assert weights(follow=False) == pytest.approx([0.02] * 4)


def test_better_but_not_right_is_not_followed(groups_of, seen_by) -> None:
    """Partial credit: b's 0.5 is wrong still, so it counts by its ratio."""
    groups = groups_of({"q": {"a": "00", "b": "01"}})
    half = Verdict(0.5, Status.WRONG)
    given = tuple(
        replace(t, verdict=half) if (t.agent, t.index) == ("b", 0) else t
        for t in groups[0].trajectories
    )
    groups = [replace(groups[0], trajectories=given)]
    credited = overlap().credit(Step("a", scored(seen_by(groups, "a"), 0.25), groups, NOBODY))
    assert [s.weight for s in credited[2:]] == pytest.approx([0.25, 1.0])
    assert credited[2].advantage > 0


def test_far_replies_leave_a_finite_gradient(batch_of) -> None:
    """One that its author found nearly impossible has s = inf, which may not reach others' gradient."""
    b = batch_of(
        [[-1.0], [-1.0]],
        [False, True],
        behaviour=[-1000.0, -1.0],
        advantage=[1.0, 1.0],
    )
    output = overlap().loss(b, MIXED)
    (gradient,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    assert gradient.flatten().tolist() == pytest.approx([-1.0, -1.0])
    assert output.loss.isfinite() and output.used_B.all()


def test_a_truncated_reply_and_an_unknown_level_take_no_part(groups_of, seen_by) -> None:
    groups = groups_of({"q": {"a": "10", "b": "11"}, "r": {"a": "t", "b": "10"}})
    seen = [
        replace(s, truncated=True) if (s.source, s.index) == ("b", 1) else s
        for s in scored(seen_by(groups, "a"), 1.0)
    ]
    credited = overlap().credit(Step("a", seen, groups, NOBODY))
    assert [(s.problem_id, s.source, s.index) for s in credited] == [
        ("q", "a", 0),
        ("q", "a", 1),
        ("q", "b", 0),
    ]


def test_alone_it_is_gspo_also_where_the_view_lost_a_reply(groups_of, seen_by, batch_of) -> None:
    """A masked reply of a's own has no gradient, but its reward is part of the own mean."""
    groups = groups_of({"q": {"a": "100"}, "r": {"a": "11"}, "s": {"a": "1"}})
    gspo = make_algorithm(make_settings("gspo"))
    seen = seen_by(groups, "a")
    for view in (seen, seen[:2] + seen[3:]):
        assert overlap().credit(Step("a", view, groups, NOBODY)) == gspo.credit(
            Step("a", view, groups, NOBODY)
        )
    b = batch_of([[-1.0, -2.0], [-1.1, -1.9]], [True, True], advantage=[1.0, -2.0])
    one, two = overlap().loss(b, MIXED), gspo.loss(b, MIXED)
    assert one.loss.item() == two.loss.item() and torch.equal(one.used_B, two.used_B)


def test_its_order_is_mixed_unless_one_is_set() -> None:
    assert overlap().needs.updates == "mixed"
    assert overlap(order="own_first").needs.updates == "own_first"
