"""SGT by hand: grpo, and a peer's success where all own failed.

Two replies with rewards 1, 0: mean 1/2, std (ddof 1) sqrt(1/2), A = +-(1/2) / (sqrt(1/2) + 1e-6).
"""

from functools import partial
from math import log, sqrt

import pytest
from by_hand import batch_of, gradient, groups_of, rule, seen_by, step_of

from hacrl.types import Update

HALF = 0.5 / (sqrt(0.5) + 1e-6)
UPDATE = Update(0, 0.8, "mixed", ("q1", "q2", "q3", "q4"))


sgt = partial(rule, "sgt")


def test_which_peers_success_is_imitated() -> None:
    """a fails q1 whole and b solves it once: that reply. q2: a solved it itself. q3: all fail.
    q4: nothing of a was judged, so it did not fail. q5: b's group has nothing but successes; one."""
    groups = groups_of(
        {
            "q1": {"a": "0u", "b": "010"},
            "q2": {"a": "10", "b": "111"},
            "q3": {"a": "00", "b": "00"},
            "q4": {"a": "tt", "b": "11"},
            "q5": {"a": "0t", "b": "11"},
        }
    )
    credited = sgt().credit(step_of(groups))
    own = [s for s in credited if s.is_own]
    assert [(s.problem_id, s.index) for s in own] == [
        ("q1", 0), ("q1", 1), ("q2", 0), ("q2", 1), ("q3", 0), ("q3", 1), ("q5", 0)
    ]  # fmt: skip
    assert [s.advantage for s in own] == pytest.approx([0, 0, HALF, -HALF, 0, 0, 0], abs=1e-12)
    peers = [s for s in credited if not s.is_own]
    assert [s.problem_id for s in peers] == ["q1", "q5"]
    assert peers[0].index == 1
    assert all((s.advantage, s.weight) == (1.0, 0.1) for s in peers)


def test_the_choice_among_successes_does_not_depend_on_order() -> None:
    """The choice is a hash: the same in any order of samples, another from step to step, and no
    member is always the chosen one. A dropped reply cannot be chosen."""
    replies = {f"q{i}": {"a": "00", "b": "11", "c": "11"} for i in range(40)}
    groups = groups_of(replies)
    seen = seen_by(groups, "a")

    def chosen(samples, groups=groups):
        credited = sgt().credit(step_of(groups, samples))
        return {s.problem_id: (s.source, s.index) for s in credited if not s.is_own}

    picked = chosen(seen)
    assert picked == chosen(seen[::-1])
    assert len(picked) == 40
    assert 8 < sum(source == "b" for source, _ in picked.values()) < 32
    later = groups_of(replies, step=1)
    assert chosen(seen_by(later, "a"), later) != picked
    lost = [s for s in seen if (s.source, s.index) != picked[s.problem_id]]
    assert len(chosen(lost)) == 40
    assert not picked.items() & chosen(lost).items()


def test_loss_by_hand() -> None:
    """Own row of two tokens, old (-1, -1), now ratios 1.1 and 1: J = (1.1 + 1) * 2 with A = 2; three
    own tokens in all, the other own row having A = 0. GRPO: -4.2 / 3.
    The success has tokens -0.5 and -1.5: NLL 1, times lambda 0.1, over the 4 prompts of the update.
    loss = -1.4 + 0.025. Gradients: -2.2/3 and -2/3 on the first row, 0 on the second, and
    -0.1 / 2 / 4 on each token of the success, whatever its ratio."""
    b = batch_of(
        [[-1 + log(1.1), -1.0], [-1.0, 0.0], [-0.5, -1.5]],
        [True, True, False],
        mask=[[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]],
        old=[[-1.0, -1.0], [-1.0, 0.0], [-9.0, -0.1]],
        advantage=[2.0, 0.0, 1.0],
        weight=[1.0, 1.0, 0.1],
        behaviour=[-1.0, -1.0, float("nan")],
    )
    output = sgt().loss(b, UPDATE)
    assert output.loss.item() == pytest.approx(-1.4 + 0.025, abs=1e-12)
    assert gradient(output, b) == [
        pytest.approx([-2.2 / 3, -2 / 3], abs=1e-12),
        [0.0, 0.0],
        pytest.approx([-0.0125, -0.0125], abs=1e-12),
    ]
    assert output.weight_B.tolist() == pytest.approx([1.05, 1.0, 0.1])
    assert output.ratio_B.isfinite().all()  # a source without log-probabilities


def test_a_success_needs_no_log_probabilities_of_the_learner() -> None:
    """Peers' samples are not scored: nan beside own rows, none at all in a micro-batch of successes."""
    rows = {"advantage": [1.0, 1.0], "weight": [1.0, 0.1]}
    b = batch_of([[-1.0], [-0.5]], [True, False], old=[[-1.0], [float("nan")]], **rows)
    assert gradient(sgt().loss(b, UPDATE), b) == [[-1.0], [pytest.approx(-0.1 / 4)]]
    alone = batch_of([[-0.5]], [False], advantage=[1.0], weight=[0.1])
    assert gradient(sgt().loss(alone, UPDATE), alone) == [[pytest.approx(-0.1 / 4)]]
