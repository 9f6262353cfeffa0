"""Overlap by hand: the ratio of whole texts, whose advantage, who is followed."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import pytest
import torch

from hacrl.algorithms import make_algorithm
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.capability import Capability
from hacrl.types import Finish, Status, Update, Verdict

MIXED = Update(0, 1, 0.8, "mixed", ("q",))


def overlap(**settings):
    return make_algorithm(AlgorithmSettings(name="overlap", **settings), (0.0, 1.0))


def test_own_samples_are_gspo_and_peers_are_measured_by_the_learners_mean(
    groups_of, seen_by
) -> None:
    """a: 1, 0, 0, 0. Mean 1/4, deviation 1/2: +1.5 and -0.5, whatever b does. b's 1, 1, 0, 0 lie 3/4
    above and 1/4 below a's mean; three ones in eight deviate by sqrt(8 * 3/8 * 5/8 / 7)."""
    groups = groups_of({"q": {"a": "1000", "b": "1100"}})
    credited = overlap().credit(seen_by(groups, "a"), groups, Capability({}), "a")
    std = sqrt(8 * 0.375 * 0.625 / 7) + 1e-6
    wanted = [1.5, -0.5, -0.5, -0.5, 0.75 / std, 0.75 / std, -0.25 / std, -0.25 / std]
    assert [s.advantage for s in credited] == pytest.approx(wanted, abs=1e-5)
    assert {s.weight for s in credited} == {1.0}


def test_where_the_own_group_is_uniform_the_peers_speak(groups_of, seen_by) -> None:
    """a always right: its own replies have nothing to say, b's failure is a deviation from it."""
    groups = groups_of({"q": {"a": "11", "b": "10"}, "r": {"a": "11", "b": "11"}})
    credited = overlap().credit(seen_by(groups, "a"), groups, Capability({}), "a")
    assert [s.advantage for s in credited] == pytest.approx(
        [0, 0, 0, -1 / 0.5, 0, 0, 0, 0], abs=1e-5
    )


def test_the_ratio_is_of_whole_texts(groups_of, seen_by, batch_of) -> None:
    """b wrote two tokens of mean log 0.5: its text has 1/4. In a's tokenizer it has four of mean
    log 0.5: 1/16. rho = 1/4 though the average tokens are alike, and v its root, 1/2."""
    groups = groups_of({"q": {"a": "10", "b": "01"}})
    theirs = [
        replace(t, num_tokens=2, mean_logprob=log(0.5)) if t.agent == "b" else t
        for t in groups[0].trajectories
    ]
    groups = [replace(groups[0], trajectories=tuple(theirs))]
    seen = [
        s if s.is_own else replace(s, behaviour=log(0.5), loss_mask=(0, 1, 1, 1, 1))
        for s in seen_by(groups, "a")
    ]
    credited = overlap().credit(seen, groups, Capability({}), "a")
    assert credited[2].behaviour == pytest.approx(log(0.5) / 2)
    b = batch_of([[log(0.5)] * 4], [False], behaviour=[credited[2].behaviour])
    assert overlap().overlap(b).tolist() == pytest.approx([0.5])
    assert overlap(overlap_power=1.0).overlap(b).tolist() == pytest.approx([0.25])
    assert overlap(overlap_power=0.0).overlap(b).tolist() == pytest.approx([1.0])
    # as if it had two tokens: rho = 1/2
    assert overlap(overlap_tokens=2, overlap_power=1.0).overlap(b).tolist() == pytest.approx([0.5])


def test_loss_by_hand(batch_of) -> None:
    """Two tokens a row, four rows.

    Peer, A = -2, rho = (1/2)^2: v = 1/2, J = 1/2 * -2 * m: each token -(1/2)(-2)/2/4 = 1/8.
    Peer, A = 1, more likely to the learner: v = 1: -1/8 each.
    Own, A = 1, s = 1: -1/8. Own, A = 1, s = e^0.1, above the clip: 0."""
    m = -1.0
    b = batch_of(
        [[m, m]] * 4,
        [False, False, True, True],
        behaviour=[m - log(0.5), m - 3.0, m, m - 0.1],
        advantage=[-2.0, 1.0, 1.0, 1.0],
    )
    output = overlap().loss(b, MIXED)
    (gradient,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    wanted = [1 / 8, -1 / 8, -1 / 8, 0.0]
    assert gradient.tolist() == [pytest.approx([g, g], abs=1e-9) for g in wanted]
    assert output.ratio_B.tolist() == pytest.approx([0.5, 1.0, 1.0, torch.tensor(0.1).exp().item()])
    assert output.used_B.tolist() == [True, True, True, False]


def test_a_success_is_followed_only_where_all_own_replies_failed(
    groups_of, seen_by, batch_of
) -> None:
    """q: a failed, a reply that could not be judged beside. b's success has v = 1, however unlikely
    to a; its failure has not. r: one success of a's own is enough, though b is better by far.

    One token of log -5, b's own of log -1: rho = e^-4, and v its root, e^-2."""
    groups = groups_of({"q": {"a": "0ut", "b": "10"}, "r": {"a": "100", "b": "11"}})

    def weights(**settings) -> list[float]:
        rule = overlap(**settings)
        credited = rule.credit(seen_by(groups, "a"), groups, Capability({}), "a")
        peers = [s for s in credited if not s.is_own]
        behaviour = [torch.nan if s.behaviour is None else s.behaviour for s in peers]
        far = batch_of([[-5.0]] * 4, [False] * 4, behaviour=behaviour)
        return rule.overlap(far).tolist()

    small = torch.tensor(-2.0).exp().item()
    assert weights() == pytest.approx([1, small, small, small])
    assert weights(overlap_follow=False) == pytest.approx([small] * 4)


def test_a_followed_success_has_the_learners_advantage(groups_of, seen_by) -> None:
    """a: 0, 0. b: 1, 0. Mean of a's own 0; one 1 in four deviates by 1/2: +2 and 0, own 0 and 0."""
    groups = groups_of({"q": {"a": "00", "b": "10"}})
    credited = overlap().credit(seen_by(groups, "a"), groups, Capability({}), "a")
    assert [s.advantage for s in credited] == pytest.approx([0, 0, 2, 0], abs=1e-5)
    assert [s.behaviour is None for s in credited] == [False, False, True, False]


def test_better_but_not_right_is_not_followed(groups_of, seen_by) -> None:
    """Partial credit: b's 0.5 is wrong still, so it counts by its ratio."""
    groups = groups_of({"q": {"a": "00", "b": "01"}})
    half = Verdict(0.5, Status.WRONG)
    given = tuple(
        replace(t, verdict=half) if (t.agent, t.index) == ("b", 0) else t
        for t in groups[0].trajectories
    )
    groups = [replace(groups[0], trajectories=given)]
    peers = overlap().credit(seen_by(groups, "a"), groups, Capability({}), "a")[2:]
    assert peers[0].advantage > 0 and peers[0].behaviour is not None
    assert peers[1].behaviour is None


def test_followed_and_far_replies_leave_a_finite_gradient(batch_of) -> None:
    """A followed row has no behaviour; one that the source found nearly impossible has s = inf in
    float32. Neither may reach the gradient of the others."""
    b = batch_of(
        [[-1.0], [-1.0], [-1.0]],
        [False, False, True],
        behaviour=[torch.nan, -1000.0, -1.0],
        advantage=[1.0, 1.0, 1.0],
    )
    output = overlap().loss(b, MIXED)
    (gradient,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    assert gradient.flatten().tolist() == pytest.approx([-1 / 3] * 3)
    assert output.loss.isfinite() and output.used_B.all()


def test_a_cut_reply_and_an_unknown_level_take_no_part(groups_of, seen_by) -> None:
    groups = groups_of({"q": {"a": "10", "b": "11"}, "r": {"a": "t", "b": "10"}})
    seen = [
        replace(s, finish=Finish.LENGTH) if (s.source, s.index) == ("b", 1) else s
        for s in seen_by(groups, "a")
    ]
    credited = overlap().credit(seen, groups, Capability({}), "a")
    assert [(s.problem_id, s.source, s.index) for s in credited] == [
        ("q", "a", 0),
        ("q", "a", 1),
        ("q", "b", 0),
    ]


def test_alone_it_is_gspo(groups_of, seen_by, batch_of) -> None:
    groups = groups_of({"q": {"a": "100"}, "r": {"a": "11"}})
    gspo = make_algorithm(AlgorithmSettings(name="gspo"), (0.0, 1.0))
    seen = seen_by(groups, "a")
    assert overlap().credit(seen, groups, Capability({}), "a") == gspo.credit(
        seen, groups, Capability({}), "a"
    )
    b = batch_of([[-1.0, -2.0], [-1.1, -1.9]], [True, True], advantage=[1.0, -2.0])
    one, two = overlap().loss(b, MIXED), gspo.loss(b, MIXED)
    assert one.loss.item() == two.loss.item() and torch.equal(one.used_B, two.used_B)
