"""Without samples of peers, a method is the one that it is built on."""

import pytest
from by_hand import batch_of, gradient, rule, step_of

from hacrl.types import Update

ALONE = {"q": {"a": "0100"}, "r": {"a": "0000"}, "s": {"a": "1t0"}, "u": {"a": "tt"}}
FAILING_PEER = {"q": {"a": "0100", "b": "0u"}}
TEAM = {"q": {"a": "10", "b": "10"}, "r": {"a": "00", "b": "01"}}


@pytest.mark.parametrize(
    ("name", "base", "settings", "replies"),
    [
        ("xgrpo", "grpo", {}, ALONE),
        ("sapo", "grpo", {}, ALONE),
        ("sapo", "grpo", {"external": 0.0}, TEAM),
        ("luffy", "grpo", {}, ALONE),
        ("sgt", "grpo", {}, ALONE),
        ("graft", "grpo", {}, ALONE),
        ("hacpo", "gspo", {}, ALONE),
        ("overlap", "gspo", {}, ALONE),
        ("sft-success", "gspo", {}, ALONE),
        ("sft-success", "gspo", {}, FAILING_PEER),
    ],
)
def test_credit_and_loss_are_those_of_the_base(
    name: str, base: str, settings: dict, replies: dict
) -> None:
    step = step_of(replies)
    own = step_of(step.groups, [s for s in step.samples if s.is_own])
    assert rule(name, **settings).credit(step) == rule(base).credit(own)
    b = batch_of(
        [[-1.3, -0.2], [-0.4, -0.9]],
        old=[[-1.0, -0.3], [-0.6, -0.9]],
        ref=[[-1.1, -0.2], [-0.5, -1.0]],
        behaviour=[-0.75001, -0.6502],
        advantage=[0.7, -0.7],
    )
    update = Update(0, 0.0, "mixed", ("q", "r"))
    ours, theirs = (rule(n, beta=0.2).loss(b, update) for n in (name, base))
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), abs=1e-12)
    assert ours.kl == theirs.kl
    for mine, other in zip(gradient(ours, b), gradient(theirs, b), strict=True):
        assert mine == pytest.approx(other, abs=1e-12)
