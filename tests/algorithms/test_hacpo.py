"""The open points of hacpo by hand. Rewards 1, 0, 1, 1 or 1, 0, 0, 0 have the std 1/2 (ddof 1)."""

from dataclasses import replace
from math import log, sqrt

import pytest
from by_hand import batch_of, gradient, groups_of, reply, rule, seen_by, step_of

from hacrl.algorithms import Step, make_algorithm, make_settings
from hacrl.algorithms.capability import Capability
from hacrl.errors import UserError
from hacrl.types import Group, Status, Update

FIRST = Update(0, 0.8, "own", ())
STRONGER = {"q": {"a": "10", "b": "11"}}
"""b is right twice, a once."""


@pytest.mark.parametrize(
    ("settings", "mu", "advantage", "weight"),
    [
        ({}, 0.5, 0.5, 2.0),
        ({"peer_advantage": "source"}, 0.5, 0.0, 2.0),
        ({"capability_baseline": False}, 0.75, 0.25, 2.0),
        ({"capability_weight": False}, 0.5, 0.5, 1.0),
    ],
)
def test_each_use_of_capability_is_a_setting(settings, mu, advantage, weight) -> None:
    """a: rewards 1, 0 (P 0.5); b: 1, 1 (P 1.0). Learner a: mu_a = (1 + 0 + 0.5 + 0.5) / 4 = 0.5;
    source b: mu_b = (2 + 0 + 1 + 1) / 4 = 1; the plain mean is 0.75. A peer's success is worth
    (1 - mu) / 0.500001."""
    step, hacpo = step_of(STRONGER, a=0.5, b=1.0), rule("hacpo", **settings)
    peer = hacpo.credit(step)[2]
    assert hacpo.baseline(step.groups[0], step.capability, "a") == pytest.approx(mu)
    assert peer.advantage == pytest.approx(advantage / 0.500001, abs=1e-12)
    assert peer.weight == pytest.approx(weight)


def test_baseline_guard_off_punishes_success() -> None:
    """a has P 1.0, b 0.1: w(a,b) = 10. Rewards a: 1, 0; b: 1, 0: mu = (1 + 10) / 4 = 2.75 > 1."""
    (group,) = groups_of({"q": {"a": "10", "b": "10"}})
    capability = Capability({("a", ""): 1.0, ("b", ""): 0.1})
    assert rule("hacpo").baseline(group, capability, "a") == 0.5
    off = rule("hacpo", baseline_guard=False)
    assert off.baseline(group, capability, "a") == pytest.approx(2.75)
    # without own rewards: the plain mean of the judged ones, 0.5, not (10 + 0) / 2
    (peers,) = groups_of({"q": {"b": "10"}})
    assert rule("hacpo").baseline(peers, capability, "a") == 0.5


def test_capability_by_task_reaches_baseline_and_weight() -> None:
    """On task t, a has 0.5 and b 1.0; over the whole run both are equal. By task: mu_a = (1 + 0 + 0.5
    + 0.5) / 4 = 0.5 and w(b, a) = 2; over the run: 0.75 and 1."""
    values = {("a", "t"): 0.5, ("b", "t"): 1.0, ("a", ""): 0.7, ("b", ""): 0.7}
    for by_task, mu, weight in ((True, 0.5, 2.0), (False, 0.75, 1.0)):
        step = replace(step_of(STRONGER), capability=Capability(values, by_task))
        assert rule("hacpo").baseline(step.groups[0], step.capability, "a") == pytest.approx(mu)
        assert rule("hacpo").credit(step)[2].weight == pytest.approx(weight)


def test_the_ceiling_of_peers_is_a_setting() -> None:
    """Three peers of A = 1, s = 0.5, 1.2 and 1.5, alpha 1: J = s^2, gradient -s^2 / 3 by log pi where
    the clamp leaves it. The paper keeps none of them; a ceiling of 1.3 the second; with a floor near 0
    and a ceiling far off all three stay."""
    b = batch_of(
        [[-1.0]] * 3,
        [False] * 3,
        behaviour=[-1 - log(s) for s in (0.5, 1.2, 1.5)],
        advantage=[1.0] * 3,
    )
    assert not rule("hacpo").loss(b, FIRST).weight_B.any()
    wide = rule("hacpo", ceiling=1.3).loss(b, FIRST)
    assert wide.weight_B.tolist() == pytest.approx([0.0, 1.44, 0.0])
    assert gradient(wide, b) == [pytest.approx([g]) for g in (0.0, -1.44 / 3, 0.0)]
    none = rule("hacpo", ceiling=1e9).loss(b, replace(FIRST, floor=1e-9))
    assert none.weight_B.tolist() == pytest.approx([0.25, 1.44, 2.25])
    assert gradient(none, b) == [pytest.approx([-s * s / 3]) for s in (0.5, 1.2, 1.5)]


def test_a_floor_for_failures_only() -> None:
    """Peers of s = 0.5, alpha 1, floor 0.8. A = 1: J = s^2, gradient -s^2 / 4 by log pi. A = -1 is
    refused. s = 0.9 stays for both signs."""
    b = batch_of(
        [[-1.0]] * 4,
        [False] * 4,
        behaviour=[-1 - log(s) for s in (0.5, 0.5, 0.9, 0.9)],
        advantage=[1.0, -1.0, 1.0, -1.0],
    )
    one_sided = rule("hacpo", floor_for="failures").loss(b, FIRST)
    assert one_sided.weight_B.tolist() == pytest.approx([0.25, 0.0, 0.81, 0.81])
    expected = (-0.25 / 4, 0.0, -0.81 / 4, 0.81 / 4)
    assert gradient(one_sided, b) == [pytest.approx([g], abs=1e-7) for g in expected]
    assert rule("hacpo").loss(b, FIRST).weight_B.tolist() == pytest.approx([0, 0, 0.81, 0.81])


def test_unjudged_samples_leave_the_credit() -> None:
    """A timed-out peer must not move mean or std: a: 1, 0 alone remain."""
    lost = (reply("b", 0.0, 0, status=Status.TIMEOUT), reply("b", 0.0, 1, status=Status.ERROR))
    group = Group("q", "t", (reply("a", 1.0, 0), reply("a", 0.0, 1), *lost))
    credited = rule("hacpo").credit(step_of([group]))
    half = 0.5 / (sqrt(0.5) + 1e-6)
    assert [s.advantage for s in credited] == pytest.approx([half, -half], abs=1e-12)


def test_permuting_agents_permutes_results() -> None:
    """Rename and reorder the members: every sample keeps its advantage and weight."""
    rewards, level = {"a": "101", "b": "001", "c": "111"}, {"a": 0.6, "b": 0.3, "c": 0.9}

    def credit_with(names: dict[str, str], order: str):
        replies = (reply(names[x], float(r), i) for x in order for i, r in enumerate(rewards[x]))
        groups = [Group("q", "t", tuple(replies))]
        capability = Capability({(names[x], ""): p for x, p in level.items()})
        step = Step(names["b"], seen_by(groups, names["b"]), groups, capability)
        back = {new: old for old, new in names.items()}
        credited = rule("hacpo").credit(step)
        return {(back[s.source], s.index): (s.advantage, s.weight) for s in credited}

    plain = credit_with({"a": "a", "b": "b", "c": "c"}, "abc")
    permuted = credit_with({"a": "z", "b": "x", "c": "y"}, "cab")
    assert plain.keys() == permuted.keys()
    for key, values in plain.items():
        assert permuted[key] == pytest.approx(values, abs=1e-12)


def test_negative_rewards_are_refused() -> None:
    with pytest.raises(UserError, match="at least 0"):
        make_algorithm(make_settings("hacpo"), (-1.0, 1.0))


@pytest.mark.parametrize(("floor", "last"), [(0.8, 1.0), (0.9, 0.85), (0.9, 1.2)])
def test_a_floor_that_reaches_one_is_refused(floor: float, last: float) -> None:
    with pytest.raises(ValueError, match="stay below 1"):
        rule("hacpo", floor=floor, last_floor=last)
