"""LUFFY by hand: the shaped weight f(p) = p / (p + gamma) of peers' tokens."""

from functools import partial
from math import log

import pytest
from by_hand import batch_of, gradient, rule, step_of

from hacrl.types import Update

MIXED = Update(0, 0.0, "mixed", ("q",))
luffy = partial(rule, "luffy")


def test_own_and_peers_samples_are_one_group() -> None:
    """a: 0, 0. b: 1, 1. Mean 1/2, deviation sqrt(1/3)."""
    credited = luffy().credit(step_of({"q": {"a": "00", "b": "11"}}))
    a = 0.5 * 3**0.5
    assert [s.advantage for s in credited] == pytest.approx([-a, -a, a, a], abs=1e-5)


def test_loss_by_hand() -> None:
    """Own row: ratio 1.1, A = 2: J = 2.2. Peer, p = 0.1 and 0.4, A = 2: f = 1/2 and 4/5, J = 1 + 1.6.
    Peer, p = 0.9, A = -1: f = 9/10, J = -0.9. Four tokens: loss = -(2.2 + 2.6 - 0.9) / 4.
    Slopes gamma p / (p + gamma)^2: 1/4, 0.04 / 0.25 = 0.16, 0.09. The source has no effect."""
    b = batch_of(
        [[-1 + log(1.1), 0.0], [log(0.1), log(0.4)], [log(0.9), 0.0]],
        [True, False, False],
        mask=[[1, 0], [1, 1], [1, 0]],
        old=[[-1.0, 0.0], [float("nan")] * 2, [float("nan")] * 2],
        advantage=[2.0, 2.0, -1.0],
        behaviour=[-1.0, float("nan"), -5.0],
    )
    output = luffy().loss(b, MIXED)
    assert output.loss.item() == pytest.approx(-3.9 / 4)
    wanted = [[-2.2 / 4, 0.0], [-0.5 / 4, -0.32 / 4], [0.09 / 4, 0.0]]
    assert gradient(output, b) == [pytest.approx(row) for row in wanted]
    assert output.weight_B.tolist() == pytest.approx([1.1, (0.25 + 0.16) / 2, 0.09])
    assert output.ratio_B.isfinite().all()
