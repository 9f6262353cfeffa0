"""F-TIS by hand: truncated token weights, and peers' far failures dropped."""

from functools import partial
from math import exp, log, sqrt

import pytest
from by_hand import batch_of, gradient, groups_of, rule, step_of

from hacrl.types import Update

UPDATE = Update(0, 0.8, "own", ("q",))


f_tis = partial(rule, "f-tis")


def test_every_author_by_its_own_group() -> None:
    """a: 1, 0 -> +-(1/2) / sqrt(1/2). b: 1, 1, 0 -> mean 2/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3:
    (1/3) / sqrt(1/3) and -(2/3) / sqrt(1/3). c always fails: 0. Pooled, none of these would hold."""
    groups = groups_of({"q": {"a": "10", "b": "110", "c": "000"}})
    credited = f_tis().credit(step_of(groups))
    half, std = 0.5 / (sqrt(0.5) + 1e-6), sqrt(1 / 3) + 1e-6
    wanted = [half, -half, 1 / 3 / std, 1 / 3 / std, -2 / 3 / std, 0, 0, 0]
    assert [s.advantage for s in credited] == pytest.approx(wanted, abs=1e-12)
    assert {s.weight for s in credited} == {1.0}


def test_loss_by_hand() -> None:
    """Rows of two and one tokens, three in all.

    Peer, A = 2: rho = 0.5 and 3, truncated to 2. J = 0.5 * 2 * (-1 + ln 0.5) + 2 * 2 * (-2 + ln 3).
    Own, A = -1: rho = 1.2. J = 1.2 * -1 * (-1 + ln 1.2). Only log pi has a gradient:
    -weight * A / 3: -1/3, -4/3 and +1.2/3; the truncated token keeps one."""
    b = batch_of(
        [[-1 + log(0.5), -2 + log(3)], [-1 + log(1.2), 0.0]],
        [False, True],
        mask=[[1.0, 1.0], [1.0, 0.0]],
        source=[[-1.0, -2.0], [-1.0, 0.0]],
        advantage=[2.0, -1.0],
    )
    output = f_tis().loss(b, UPDATE)
    total = 1 * (-1 + log(0.5)) + 4 * (-2 + log(3)) - 1.2 * (-1 + log(1.2))
    assert output.loss.item() == pytest.approx(-total / 3, abs=1e-12)
    assert gradient(output, b) == [
        pytest.approx([-1 / 3, -4 / 3], abs=1e-12),
        pytest.approx([1.2 / 3, 0.0], abs=1e-12),
    ]
    assert output.weight_B.tolist() == pytest.approx([1.25, 1.2])


def test_a_far_failure_of_a_peer_is_dropped() -> None:
    """KL estimates: two tokens, each 26 below the source's: 52 > 50. Dropped only as a peer's sample
    with a negative advantage; a success or an own sample stays, and so does 48. The dropped row
    still counts in the mean: 8 tokens."""
    near, far = [-25.0, -25.0], [-27.0, -27.0]
    b = batch_of(
        [far, far, far, near],
        [False, False, True, False],
        source=[[-1.0, -1.0]] * 4,
        advantage=[-1.0, 1.0, -1.0, -1.0],
    )
    output = f_tis().loss(b, UPDATE)
    assert output.weight_B.tolist() == pytest.approx([0.0, exp(-26), exp(-26), exp(-24)])
    dropped, *kept = gradient(output, b)
    assert dropped == [0.0, 0.0] and all(g for row in kept for g in row)
    assert kept[2] == pytest.approx([exp(-24) / 8] * 2, rel=1e-9)
    assert f_tis(kl_threshold=53.0).loss(b, UPDATE).weight_B.all()


def test_the_cap_is_a_setting_and_an_unlikely_source_does_no_harm() -> None:
    """rho = exp(199) and, in float32, inf: the weight is the cap."""
    b = batch_of([[-1.0]], [False], source=[[-200.0]], advantage=[1.0])
    assert f_tis(tis_cap=3.0).loss(b, UPDATE).loss.item() == pytest.approx(3.0)
    assert f_tis().loss(b, UPDATE).loss.item() == pytest.approx(2.0)
