"""SFT on successes by hand: gspo, and every success of every peer."""

from functools import partial

import pytest
from by_hand import batch_of, gradient, rule, step_of

from hacrl.types import Update

UPDATE = Update(0, 0.0, "mixed", ("q1", "q2", "q3", "q4"))
sft = partial(rule, "sft-success")


def test_which_samples_are_imitated() -> None:
    """All successes, also where a succeeded itself. A prompt's weight is lambda in all: q1 has three
    successes with 0.1 / 3 each, q2 one with 0.1. A reply without verdict is no success."""
    step = step_of({"q1": {"a": "10", "b": "1010", "c": "1u"}, "q2": {"a": "00", "b": "1t"}})
    credited = sft().credit(step)
    own = [s for s in credited if s.is_own]
    alone = step_of(step.groups, [s for s in step.samples if s.is_own])
    assert own == rule("gspo").credit(alone)
    peers = [(s.problem_id, s.source, s.index) for s in credited if not s.is_own]
    assert peers == [("q1", "b", 0), ("q1", "b", 2), ("q1", "c", 0), ("q2", "b", 0)]
    weights = [s.weight for s in credited if not s.is_own]
    assert weights == pytest.approx([0.1 / 3] * 3 + [0.1])
    assert {s.advantage for s in credited if not s.is_own} == {1.0}


def test_loss_by_hand() -> None:
    """Own rows, s = 1, A = 2 and -1: GSPO = -(2 - 1) / 2. A success with tokens -0.5 and -1.5 and weight
    0.05: NLL 1 * 0.05 over the 4 prompts of the update. Gradients of a token: -2 / 2 / 2, 1 / 2 / 2 and
    -0.05 / 2 / 4, whatever the source's log-probability."""
    b = batch_of(
        [[-1.0, -1.0], [-0.5, -1.5], [-0.5, -1.5]],
        [True, True, False],
        advantage=[2.0, -1.0, 1.0],
        weight=[1.0, 1.0, 0.05],
        behaviour=[-1.0, -1.0, float("nan")],
    )
    output = sft().loss(b, UPDATE)
    assert output.loss.item() == pytest.approx(-0.5 + 0.0125, abs=1e-12)
    wanted = [-0.5, 0.25, -0.00625]
    assert gradient(output, b) == [pytest.approx([g, g], abs=1e-12) for g in wanted]
    assert output.weight_B.tolist() == pytest.approx([1.0, 1.0, 0.05])
    assert output.ratio_B.isfinite().all()


def test_an_update_of_successes_alone() -> None:
    """Every own row may be pruned from a micro-batch."""
    b = batch_of([[-0.5]], [False], advantage=[1.0], weight=[0.1], behaviour=[float("nan")])
    assert gradient(sft().loss(b, UPDATE), b) == [[pytest.approx(-0.1 / 4)]]
