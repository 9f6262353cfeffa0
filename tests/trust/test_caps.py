"""Caps by hand: no peer has more than its fraction of what is left."""

from dataclasses import replace
from math import log

import pytest

from hacrl.trust.caps import (
    cap_ratios,
    cap_samples,
    cap_unlikely,
    cap_weights,
    gradient_size,
    limits,
)
from hacrl.types import Sample


def sample(source: str, index: int, advantage: float = 1.0, weight: float = 1.0) -> Sample:
    own = source == "me"
    return Sample("q", index, source, own, (1, 2), (0, 1), -0.5, advantage=advantage, weight=weight)


def test_limits_by_hand() -> None:
    """Rest 50, largest = 50 / 4 / (1 - 1/4) = 50 / 3; then 10 is below it."""
    assert limits(40, {"ant": 50, "bee": 10}, 0.25) == {"ant": pytest.approx(50 / 3)}
    # Both are over: rest 40, each 0.25 of 80. bee is over only after ant is reduced.
    assert limits(40, {"ant": 50, "bee": 25}, 0.25) == {"ant": 20, "bee": 20}
    assert limits(40, {"ant": 10, "bee": 10}, 0.25) == {}
    assert limits(40, {"ant": 1000}, 1.0) == {}
    assert limits(0, {"ant": 5}, 0.5) == {"ant": 0}  # nothing of its own to weigh against it


def test_samples_over_the_fraction_are_left_out() -> None:
    samples = [sample("me", i) for i in range(6)] + [sample("ant", i) for i in range(20)]
    kept, left_out = cap_samples(samples, 0.4, seed=0, step=0)
    assert [s.source for s in kept] == ["me"] * 6 + ["ant"] * 4  # 4 of 10
    assert left_out == {"ant": 16}
    again, _ = cap_samples(samples[::-1], 0.4, seed=0, step=0)
    assert {s.index for s in again if s.source == "ant"} == {s.index for s in kept[6:]}
    other, _ = cap_samples(samples, 0.4, seed=0, step=1)
    assert other != kept  # another choice in another step


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_no_peer_keeps_more_than_its_fraction(fraction: float) -> None:
    counts = {"me": 7, "ant": 40, "bee": 13, "cat": 2}
    samples = [sample(name, i) for name, n in counts.items() for i in range(n)]
    kept, left_out = cap_samples(samples, fraction, 0, 0)
    for name, n in counts.items():
        left = sum(s.source == name for s in kept)
        assert n - left == left_out[name]
        if name == "me":
            assert left == n
        else:  # rounding down may leave one sample less
            assert left <= fraction * (len(kept) + len(counts)) + 1e-9
            assert not left_out[name] or left + 1 > fraction * len(kept)


def test_advantages_are_scaled_to_the_fraction_of_the_weight() -> None:
    """Own sum 4; ant's 2 x |3 x 2| = 12. A quarter of the total x is ant's: 4 + x / 4 = x, so ant keeps
    4 / 3 of its 12."""
    samples = [sample("me", 0, 3.0), sample("me", 1, -1.0)]
    samples += [sample("ant", 0, 3.0, 2.0), sample("ant", 1, -3.0, 2.0), sample("bee", 0, 0.0)]
    scaled, factors = cap_weights(samples, 0.25)
    assert factors == {"ant": pytest.approx(1 / 9)}
    assert [s.advantage for s in scaled] == pytest.approx([3, -1, 1 / 3, -1 / 3, 0])
    assert scaled[:2] == samples[:2] and [s.weight for s in scaled] == [1, 1, 2, 2, 1]
    assert cap_weights(samples, 1.0) == (samples, {})


def test_late_samples_share_the_limits_with_those_of_the_step() -> None:
    """Own 6, ant 3 in time. 0.4 of a total of 10 is 4, so one of ant's late samples is left, and all
    four of bee's. By weight: own 6, ant 3 x 1 and 5 x 2; a quarter of 8 is 2, which ant has already."""
    used = [sample("me", i) for i in range(6)] + [sample("ant", i) for i in range(3)]
    late = [sample("ant", 10 + i, -1.0, 2.0) for i in range(5)]
    kept, left_out = cap_samples(late, 0.4, seed=0, step=0, before=used)
    assert len(kept) == 1 and left_out == {"ant": 4}
    kept, left_out = cap_samples([sample("bee", i) for i in range(4)], 0.4, 0, 0, before=used)
    assert len(kept) == 4 and not left_out  # 4 of 13
    scaled, factors = cap_weights(late, 0.25, before=used)
    assert factors == {"ant": 0} and {s.advantage for s in scaled} == {0}
    # Half: ant may have 6 and has 3, so 3 of its late 10.
    scaled, factors = cap_weights(late, 0.5, before=used)
    assert factors == {"ant": pytest.approx(0.3)}
    assert [s.advantage for s in scaled] == pytest.approx([-0.3] * 5)
    own = [replace(s, old_logprobs=(-0.1,)) for s in used[:6]]
    scored = [replace(s, old_logprobs=(-0.1 - 0.1 * (i > 1),)) for i, s in enumerate(late)]
    assert cap_unlikely(scored, scored, 0.0, before=own)[1] == {"ant": 3}


def test_the_norm_of_gradients_is_estimated_and_capped() -> None:
    """Two tokens of 1/2: sqrt(1/2) / 2. One token of 1/4 counts 3/4. Own sum 4 x 0.354 = 1.414, ant's
    2 x 0.75 = 1.5; a third of the total is half of the own sum, 0.707 = 0.471 of ant's."""
    own = [replace(sample("me", i), old_logprobs=(log(0.5), log(0.5))) for i in range(4)]
    ant = [replace(sample("ant", i), old_logprobs=(log(0.25),)) for i in range(2)]
    assert gradient_size(own[0].old_logprobs or ()) == pytest.approx(0.5**0.5 / 2)
    assert gradient_size(ant[0].old_logprobs or ()) == pytest.approx(0.75)
    assert gradient_size([0.0]) == gradient_size([]) == 0
    _, factors = cap_weights(
        [*own, *ant], 1 / 3, size=lambda s: gradient_size(s.old_logprobs or ())
    )
    assert factors == {"ant": pytest.approx(0.5**0.5 / 1.5)}
    assert cap_weights([*own, *ant], 1 / 3)[1] == {}  # 2 of 6 by weight


def test_samples_over_the_ratio_are_left_out() -> None:
    """Claimed -0.5 per token. Their mean -0.1 is s = e^0.4 = 1.49; 0.2 is e^0.7 = 2.01."""
    samples = [sample("me", 0), sample("ant", 0), sample("ant", 1), sample("bee", 0)]
    means = {("ant", 0): (-0.3, 0.1), ("ant", 1): (0.2,), ("bee", 0): (log(2) - 0.5,)}
    scored = [replace(s, old_logprobs=means[s.source, s.index]) for s in samples[1:]]
    kept, left_out = cap_ratios(samples, scored, 2.0)
    assert kept == [samples[0], samples[1], samples[3]] and left_out == {"ant": 1}
    assert cap_ratios(samples, scored[:1], 1.4)[1] == {"ant": 1}
    unknown = [replace(s, behaviour=None) for s in scored]  # no claim, no ratio
    assert cap_ratios(samples, unknown, 1.4) == (samples, {})


def test_samples_that_the_learner_would_hardly_write_are_left_out() -> None:
    """Own means -0.4, -0.3, -0.2, -0.1. The quantile 0.25 is -0.3, so -0.35 is left out; whatever the
    peer claims."""
    own = [replace(sample("me", i), old_logprobs=(-0.1 * (i + 1),)) for i in range(4)]
    peers = [sample("ant", 0), replace(sample("ant", 1), behaviour=-50.0), sample("bee", 0)]
    means = [(-0.2, -0.4), (-0.35,), (-0.4,)]
    scored = [replace(s, old_logprobs=x) for s, x in zip(peers, means, strict=True)]
    kept, left_out = cap_unlikely([*own, *peers], scored, 0.25)
    assert kept == [*own, peers[0]] and left_out == {"ant": 1, "bee": 1}
    assert cap_unlikely([*own, *peers], scored, 0.0) == ([*own, *peers], {})
    assert cap_unlikely(peers, scored, 0.5) == (peers, {})  # no own samples, no limit
