"""Hand-worked numbers for gspo, grpo, naive, the KL term and the open points of hacpo.

All rewards are 0 or 1. Two samples with rewards 1, 0: mean 1/2, std (ddof 1) = sqrt(1/2), so
A = +-(1/2) / (sqrt(1/2) + 1e-6) = +-0.70710578.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch

from hacrl.algorithms import Needs, Step, make_algorithm, make_settings
from hacrl.algorithms.capability import Capability
from hacrl.errors import UserError
from hacrl.types import (
    Finish,
    Group,
    MicroBatch,
    Sample,
    Sampling,
    Status,
    Trajectory,
    Turn,
    Update,
    Verdict,
)

HALF = 0.5 / (sqrt(0.5) + 1e-6)
FIRST = Update(0, 1, 0.8, "own", ())


def algorithm(name: str, **settings):
    return make_algorithm(make_settings(name, **settings))


def trajectory(agent: str, index: int, reward: float, status: Status = Status.OK) -> Trajectory:
    return Trajectory(
        problem_id="q",
        task="t",
        agent=agent,
        index=index,
        step=0,
        policy_version=0,
        turns=(Turn("assistant", "x", True),),
        finish=Finish.STOP,
        mean_logprob=-1.0,
        num_tokens=1,
        verdict=Verdict(reward, status),
        verifier="test/1",
        sampling=Sampling(1.0, 4),
        shareable=True,
    )


def sample(source: str, index: int, learner: str = "a") -> Sample:
    return Sample("q", index, source, source == learner, (1, 2), (0, 1), -1.0)


def batch(
    logprobs, mask=None, *, behaviour=None, old=None, ref=None, advantage, weight=None, own=None
) -> MicroBatch:
    logprobs_BT = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor(mask, dtype=torch.float64) if mask else torch.ones_like(logprobs_BT)
    rows = len(logprobs)
    own = own or [True] * rows

    def tensor(values, default):
        return torch.tensor(values or [default] * rows, dtype=torch.float64)

    return MicroBatch(
        logprobs_BT=logprobs_BT,
        mask_BT=mask_BT,
        behaviour_B=tensor(behaviour, float("nan")),
        old_logprobs_BT=None if old is None else torch.tensor(old, dtype=torch.float64),
        ref_logprobs_BT=None if ref is None else torch.tensor(ref, dtype=torch.float64),
        advantage_B=tensor(advantage, 0.0),
        weight_B=tensor(weight, 1.0),
        is_own_B=torch.tensor(own),
        num_samples=rows,
        num_own=sum(own),
        num_tokens=int(mask_BT.sum()),
    )


def gradient(output, b: MicroBatch) -> list[list[float]]:
    (grad,) = torch.autograd.grad(output.loss, b.logprobs_BT)
    return grad.tolist()


# ---------------------------------------------------------------- grpo


def test_grpo_by_hand() -> None:
    """Two rows of 2 and 1 tokens, 3 tokens in all; A = +1 and -1.

    Row 1: old (-1, -1), new (-1 + ln 1.1, -1 + ln 1.5): ratios 1.1 and 1.5; 1.5 > 1.28 is clipped:
    J = 1.1 + 1.28. Row 2: ratio 0.5 < 0.8 with A = -1: min(-0.5, -0.8) = -0.8, no gradient.
    loss = -(1.1 + 1.28 - 0.8) / 3; d loss / d logprob = -1.1 / 3, 0, 0.
    """
    b = batch(
        [[-1 + log(1.1), -1 + log(1.5)], [-1 + log(0.5), 0.0]],
        [[1, 1], [1, 0]],
        old=[[-1.0, -1.0], [-1.0, 0.0]],
        advantage=[1.0, -1.0],
    )
    output = algorithm("grpo").loss(b, FIRST)
    assert output.loss.item() == pytest.approx(-(1.1 + 1.28 - 0.8) / 3, abs=1e-12)
    assert gradient(output, b) == [
        pytest.approx([-1.1 / 3, 0.0], abs=1e-12),
        pytest.approx([0.0, 0.0], abs=1e-12),
    ]
    assert output.used_B.tolist() == [True, False]


# ---------------------------------------------------------------- gspo


def test_gspo_by_hand() -> None:
    """One row of two tokens: mean log-probability moves from -1 to -1 + 0.0002, s = exp(0.0002),
    inside 1 + 4e-4: J = s A. The other, A = -2, moves by -0.001: s = exp(-0.001) < 1 - 3e-4, the clip
    wins: J = -2 * (1 - 3e-4). loss = -(J1 + J2) / 2; gradient of row 1 on each of its two tokens:
    -s A / 2 / 2."""
    b = batch([[-0.9996, -1.0], [-1.001, -1.001]], behaviour=[-1.0, -1.0], advantage=[1.5, -2.0])
    output = algorithm("gspo").loss(b, FIRST)
    s = exp(0.0002)
    assert output.loss.item() == pytest.approx(-(1.5 * s - 2 * (1 - 3e-4)) / 2, abs=1e-12)
    assert gradient(output, b) == [
        pytest.approx([-s * 1.5 / 4] * 2, abs=1e-12),
        pytest.approx([0.0, 0.0], abs=1e-12),
    ]
    assert output.used_B.tolist() == [True, False]


def test_gspo_credits_own_group_only() -> None:
    """Own rewards 1, 0 give A = +-0.7071; the peer's two failures do not count."""
    group = Group(
        "q", "t", (*(trajectory("a", i, 1.0 - i) for i in (0, 1)), trajectory("b", 0, 0.0))
    )
    credited = algorithm("gspo").credit(
        Step("a", [sample("a", 0), sample("a", 1)], [group], Capability({}))
    )
    assert [s.advantage for s in credited] == pytest.approx([HALF, -HALF], abs=1e-12)


# ---------------------------------------------------------------- naive


def test_naive_pools_plainly_and_clips_peers_like_own() -> None:
    """Rewards a: 1, 0; b: 0, 0. Mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
    A(1) = 0.75 / 0.500001, A(0) = -0.25 / 0.500001, for every source and without weights."""
    group = Group(
        "q",
        "t",
        (
            trajectory("a", 0, 1.0),
            trajectory("a", 1, 0.0),
            trajectory("b", 0, 0.0),
            trajectory("b", 1, 0.0),
        ),
    )
    rule = algorithm("naive")
    capability = Capability({("a", ""): 0.5, ("b", ""): 0.1})
    credited = rule.credit(Step("a", [sample("a", 0), sample("b", 1)], [group], capability))
    assert [s.advantage for s in credited] == pytest.approx([0.75 / 0.500001, -0.25 / 0.500001])
    assert [s.weight for s in credited] == [1.0, 1.0]
    b = batch([[-1.0], [-1.2]], behaviour=[-1.0, -1.0], advantage=[1.0, -1.0], own=[True, False])
    output = rule.loss(b, FIRST)  # the peer's s = exp(-0.2) < 1 - 3e-4: clipped at 0.9997
    assert output.loss.item() == pytest.approx(-(1.0 - 0.9997) / 2, abs=1e-12)
    assert gradient(output, b)[1] == [0.0]


# ---------------------------------------------------------------- KL


def test_kl_by_hand_counts_own_samples_only() -> None:
    """k3 = r - ln r - 1 with r = pi_start / pi. Row 1 (own): r = 2 and 1 -> (1 - ln 2) and 0, mean
    (1 - ln 2) / 2. Row 2 is a peer's and does not count. One own sample, so KL = (1 - ln 2) / 2;
    with beta = 0.1 and A = 0 the loss is 0.1 of it, and its gradient on the first token is
    0.1 * (1 - r) / 2 = -0.05."""
    b = batch(
        [[-1.0, -1.0], [-1.0, -1.0]],
        behaviour=[-1.0, -1.0],
        ref=[[-1.0 + log(2), -1.0], [-3.0, -3.0]],
        advantage=[0.0, 0.0],
        own=[True, False],
    )
    output = algorithm("hacpo", beta=0.1).loss(b, FIRST)
    assert output.kl == pytest.approx((1 - log(2)) / 2, abs=1e-12)
    assert output.loss.item() == pytest.approx(0.1 * (1 - log(2)) / 2, abs=1e-12)
    assert gradient(output, b) == [
        pytest.approx([-0.05, 0.0], abs=1e-12),
        pytest.approx([0.0, 0.0], abs=1e-12),
    ]


def test_kl_of_a_minibatch_is_the_sum_over_its_microbatches() -> None:
    whole = batch(
        [[-1.0], [-2.0], [-0.5]],
        behaviour=[-1.0, -2.0, -0.5],
        ref=[[-1.2], [-1.7], [-0.9]],
        advantage=[1.0, -1.0, 0.5],
    )
    rule = algorithm("gspo", beta=0.3)
    parts = 0.0
    for i in range(3):
        row = slice(i, i + 1)
        parts += rule.loss(
            replace(
                whole,
                logprobs_BT=whole.logprobs_BT[row],
                mask_BT=whole.mask_BT[row],
                behaviour_B=whole.behaviour_B[row],
                ref_logprobs_BT=whole.ref_logprobs_BT[row],
                advantage_B=whole.advantage_B[row],
                weight_B=whole.weight_B[row],
                is_own_B=whole.is_own_B[row],
            ),
            FIRST,
        ).loss.item()
    assert parts == pytest.approx(rule.loss(whole, FIRST).loss.item(), abs=1e-12)


# ---------------------------------------------------------------- hacpo's open points


def test_one_agent_under_hacpo_is_gspo_exactly() -> None:
    group = Group("q", "t", tuple(trajectory("a", i, float(i % 3 == 0)) for i in range(8)))
    samples = [sample("a", i) for i in range(8)]
    capability = Capability({("a", ""): 0.37})
    credited = [
        algorithm(name).credit(Step("a", samples, [group], capability))
        for name in ("hacpo", "gspo")
    ]
    assert credited[0] == credited[1]
    torch.manual_seed(0)
    logprobs = (-torch.rand(8, 5)).tolist()
    b = batch(
        logprobs,
        behaviour=[sum(row) / 5 - 0.0001 * i for i, row in enumerate(logprobs)],
        advantage=[s.advantage for s in credited[0]],
    )
    ours, theirs = (algorithm(name).loss(b, FIRST) for name in ("hacpo", "gspo"))
    assert ours.loss.item() == theirs.loss.item()
    assert gradient(ours, b) == gradient(theirs, b)
    assert torch.equal(ours.used_B, theirs.used_B)


def test_sources_advantage_as_printed() -> None:
    """a: rewards 1, 0 (P 0.5); b: 1, 1 (P 1.0). Learner a: mu_a = (1 + 0 + 0.5 + 0.5) / 4 = 0.5;
    source b: mu_b = (2 + 0 + 1 + 1) / 4 = 1. Std of 1, 0, 1, 1 is 0.5. A peer's success is worth
    (1 - 0.5) / 0.500001 by the learner's measure and 0 by the source's own."""
    group = Group(
        "q",
        "t",
        (
            trajectory("a", 0, 1.0),
            trajectory("a", 1, 0.0),
            trajectory("b", 0, 1.0),
            trajectory("b", 1, 1.0),
        ),
    )
    capability = Capability({("a", ""): 0.5, ("b", ""): 1.0})
    for setting, expected in (("learner", 0.5 / 0.500001), ("source", 0.0)):
        rule = algorithm("hacpo", peer_advantage=setting)
        (credited,) = rule.credit(Step("a", [sample("b", 0)], [group], capability))
        assert credited.advantage == pytest.approx(expected, abs=1e-12)
        assert credited.weight == 2.0


def test_baseline_guard_off_punishes_success() -> None:
    """a has P 1.0, b 0.1: w(a,b) = 10. Rewards a: 1, 0; b: 1, 0: mu = (1 + 10) / 4 = 2.75 > 1."""
    group = Group("q", "t", tuple(trajectory(x, i, 1.0 - i) for x in "ab" for i in (0, 1)))
    capability = Capability({("a", ""): 1.0, ("b", ""): 0.1})
    assert algorithm("hacpo").baseline(group, capability, "a") == 0.5
    off = algorithm("hacpo", baseline_guard=False)
    assert off.baseline(group, capability, "a") == pytest.approx(2.75)
    # without own rewards the judged ones' plain mean stands in: 1, 0 -> 0.5, not (10 + 0) / 2
    peers = Group("q", "t", tuple(t for t in group.trajectories if t.agent == "b"))
    assert algorithm("hacpo").baseline(peers, capability, "a") == 0.5


def test_capability_by_task_reaches_baseline_and_weight() -> None:
    """On task t, a has 0.5 and b 1.0; over the whole run both are equal. By task: mu_a = (1 + 0 + 0.5
    + 0.5) / 4 = 0.5 and w(b, a) = 2; over the run: 0.75 and 1."""
    group = Group(
        "q",
        "t",
        (
            *(trajectory("a", i, 1.0 - i) for i in (0, 1)),
            *(trajectory("b", i, 1.0) for i in (0, 1)),
        ),
    )
    values = {("a", "t"): 0.5, ("b", "t"): 1.0, ("a", ""): 0.7, ("b", ""): 0.7}
    for by_task, mu, weight in ((True, 0.5, 2.0), (False, 0.75, 1.0)):
        capability = Capability(values, by_task)
        rule = algorithm("hacpo")
        assert rule.baseline(group, capability, "a") == pytest.approx(mu)
        (credited,) = rule.credit(Step("a", [sample("b", 0)], [group], capability))
        assert credited.weight == pytest.approx(weight)


def test_each_use_of_capability_can_be_switched_off_alone() -> None:
    """The same group: with both, mu_a = 0.5 and weight 2; without the baseline the plain mean of 1, 0,
    1, 1 is 0.75; without the weight it is 1."""
    group = Group(
        "q",
        "t",
        (
            *(trajectory("a", i, 1.0 - i) for i in (0, 1)),
            *(trajectory("b", i, 1.0) for i in (0, 1)),
        ),
    )
    capability = Capability({("a", ""): 0.5, ("b", ""): 1.0})
    for off, mu, weight in (
        ({}, 0.5, 2.0),
        ({"capability_baseline": False}, 0.75, 2.0),
        ({"capability_weight": False}, 0.5, 1.0),
    ):
        rule = algorithm("hacpo", **off)
        (credited,) = rule.credit(Step("a", [sample("b", 0)], [group], capability))
        assert rule.baseline(group, capability, "a") == pytest.approx(mu)
        assert credited.advantage == pytest.approx((1 - mu) / 0.500001)
        assert credited.weight == pytest.approx(weight)


def test_the_ceiling_of_peers_is_a_setting() -> None:
    """Three peers of A = 1, s = 0.5, 1.2 and 1.5, alpha 1: J = s^2, gradient -s^2 / 3 by log pi where
    the clamp leaves it. The paper keeps none of them; a ceiling of 1.3 the second; with a floor near 0
    and a ceiling far off all three stay."""
    b = batch(
        [[-1.0]] * 3,
        behaviour=[-1 - log(0.5), -1 - log(1.2), -1 - log(1.5)],
        advantage=[1.0] * 3,
        own=[False] * 3,
    )
    paper = algorithm("hacpo").loss(b, FIRST)
    assert paper.used_B.tolist() == [False, False, False]
    wide = algorithm("hacpo", ceiling=1.3).loss(b, FIRST)
    assert wide.used_B.tolist() == [False, True, False]
    assert gradient(wide, b) == [pytest.approx([g]) for g in (0.0, -1.44 / 3, 0.0)]
    none = algorithm("hacpo", ceiling=1e9).loss(b, replace(FIRST, floor=1e-9))
    assert none.used_B.tolist() == [True, True, True]
    assert gradient(none, b) == [pytest.approx([-s * s / 3]) for s in (0.5, 1.2, 1.5)]


def test_unjudged_samples_leave_the_credit() -> None:
    """A timed-out peer must not move mean or std: a: 1, 0 alone remain."""
    group = Group(
        "q",
        "t",
        (
            trajectory("a", 0, 1.0),
            trajectory("a", 1, 0.0),
            trajectory("b", 0, 0.0, Status.TIMEOUT),
            trajectory("b", 1, 0.0, Status.ERROR),
        ),
    )
    (credited, _) = algorithm("hacpo").credit(
        Step("a", [sample("a", 0), sample("a", 1)], [group], Capability({}))
    )
    assert credited.advantage == pytest.approx(HALF, abs=1e-12)


def test_fewer_than_two_judged_give_no_signal() -> None:
    group = Group("q", "t", (trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, Status.TIMEOUT)))
    for name in ("hacpo", "gspo", "naive"):
        (credited,) = algorithm(name).credit(Step("a", [sample("a", 0)], [group], Capability({})))
        assert credited.advantage == 0.0


def test_permuting_agents_permutes_results() -> None:
    """Rename and reorder the members: every sample keeps its advantage and weight."""
    rewards = {"a": (1.0, 0.0, 1.0), "b": (0.0, 0.0, 1.0), "c": (1.0, 1.0, 1.0)}
    level = {"a": 0.6, "b": 0.3, "c": 0.9}

    def credit_with(names: dict[str, str], order: str):
        group = Group(
            "q",
            "t",
            tuple(trajectory(names[x], i, r) for x in order for i, r in enumerate(rewards[x])),
        )
        capability = Capability({(names[x], ""): p for x, p in level.items()})
        samples = [replace(sample(names[x], i), is_own=x == "b") for x in order for i in range(3)]
        credited = algorithm("hacpo").credit(Step(names["b"], samples, [group], capability))
        back = {new: old for old, new in names.items()}
        return {(back[s.source], s.index): (s.advantage, s.weight) for s in credited}

    plain = credit_with({"a": "a", "b": "b", "c": "c"}, "abc")
    permuted = credit_with({"a": "z", "b": "x", "c": "y"}, "cab")
    assert plain.keys() == permuted.keys()
    for key, (advantage, weight) in plain.items():
        assert permuted[key] == pytest.approx((advantage, weight), abs=1e-12)


def test_negative_rewards_are_refused() -> None:
    with pytest.raises(UserError, match="at least 0"):
        make_algorithm(make_settings("hacpo"), (-1.0, 1.0))


@pytest.mark.parametrize(("floor", "last"), [(0.8, 1.0), (0.9, 0.85), (0.9, 1.2)])
def test_a_floor_that_reaches_one_is_refused(floor: float, last: float) -> None:
    with pytest.raises(ValueError, match="stay below 1"):
        algorithm("hacpo", floor=floor, last_floor=last)


def test_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="hacpo, gspo, grpo, naive, sgt, graft, f-tis"):
        algorithm("hapco")


ELSEWHERE = """
from hacrl.algorithms import Algorithm, Needs
from hacrl.algorithms.base import PeerSettings
from hacrl.algorithms.gspo import Gspo, GspoSettings
class Mixed(Gspo):
    class Settings(PeerSettings, GspoSettings):
        cap: float = 2.0
    needs = Needs("logprob", updates="mixed")
class Half(Algorithm):
    def credit(self, step): return []
class Foreign:
    pass
def function(settings, reward_range): pass
"""


def test_an_algorithm_by_import_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    assert algorithm("elsewhere:Mixed").needs.updates == "mixed"
    changed = algorithm("elsewhere:Mixed", order="peers_first", cap=3.0)
    assert (changed.needs.updates, changed.settings.cap) == ("peers_first", 3.0)
    for name, words in (
        ("Half", "define loss in the class"),
        ("Foreign", "derive it from hacrl.algorithms.Algorithm"),
        ("function", "is not an algorithm"),
        ("Missing", "has no 'Missing'"),
    ):
        with pytest.raises(UserError, match=words):
            algorithm(f"elsewhere:{name}")


def test_needs_are_levels_and_unknown_ones_are_named() -> None:
    levels = ("none", "outcomes", "text", "logprob", "tokens")
    assert [Needs(peers).include("text") for peers in levels] == [False, False, True, True, True]
    with pytest.raises(UserError, match=r"Needs.updates = 'sideways'.*own_first, peers_first"):
        Needs(updates="sideways")
