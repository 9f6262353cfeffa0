"""Caps by hand: no peer has more than its fraction of what is left."""

from dataclasses import replace
from math import log

import pytest

from hacrl.trust.caps import cap_weights, limits, over_ratio, surplus, unlikely
from hacrl.types import Sample


def sample(source: str, index: int, advantage: float = 1.0, weight: float = 1.0) -> Sample:
    own = source == "me"
    return Sample("q", index, source, own, (1, 2), (0, 1), -0.5, advantage=advantage, weight=weight)


def scored(source: str, index: int, *logprobs: float) -> Sample:
    return replace(sample(source, index), old_logprobs=logprobs)


@pytest.mark.parametrize(
    ("own", "peers", "fraction", "expected"),
    [
        # Rest 50, largest = 50 / 4 / (1 - 1/4) = 50 / 3; then 10 is below it.
        (40, {"ant": 50, "bee": 10}, 0.25, {"ant": pytest.approx(50 / 3)}),
        # Both are over: rest 40, each 0.25 of 80. bee is over only after ant is reduced.
        (40, {"ant": 50, "bee": 25}, 0.25, {"ant": 20, "bee": 20}),
        (40, {"ant": 10, "bee": 10}, 0.25, {}),
        (40, {"ant": 1000}, 1.0, {}),
        (0, {"ant": 5}, 0.5, {"ant": 0}),  # nothing of its own to weigh against it
    ],
)
def test_limits_by_hand(own: float, peers: dict, fraction: float, expected: dict) -> None:
    assert limits(own, peers, fraction) == expected


def test_samples_over_the_fraction_are_left_out() -> None:
    samples = [sample("me", i) for i in range(6)] + [sample("ant", i) for i in range(20)]
    out = surplus(samples, 0.4, seed=0, step=0)
    assert len(out) == 16 and {source for source, _, _ in out} == {"ant"}  # 4 of 10 are left
    assert surplus(samples[::-1], 0.4, seed=0, step=0) == out
    assert surplus(samples, 0.4, seed=0, step=1) != out  # another choice in another step


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_no_peer_keeps_more_than_its_fraction(fraction: float) -> None:
    counts = {"me": 7, "ant": 40, "bee": 13, "cat": 2}
    samples = [sample(name, i) for name, n in counts.items() for i in range(n)]
    out = surplus(samples, fraction, 0, 0)
    kept = len(samples) - len(out)
    for name, n in counts.items():
        dropped = sum(source == name for source, _, _ in out)
        if name == "me":
            assert not dropped
        else:  # rounding down may leave one sample less
            assert n - dropped <= fraction * (kept + len(counts)) + 1e-9
            assert not dropped or n - dropped + 1 > fraction * kept


def test_advantages_are_scaled_to_the_fraction_of_the_weight() -> None:
    """Own sum 4; ant's 2 x |3 x 2| = 12. A quarter of the total x is ant's: 4 + x / 4 = x, so ant keeps
    4 / 3 of its 12."""
    samples = [sample("me", 0, 3.0), sample("me", 1, -1.0)]
    samples += [sample("ant", 0, 3.0, 2.0), sample("ant", 1, -3.0, 2.0), sample("bee", 0, 0.0)]
    scaled, factors = cap_weights(samples, 0.25)
    assert factors == {"ant": pytest.approx(1 / 9)}
    assert [s.advantage for s in scaled] == pytest.approx([3, -1, 1 / 3, -1 / 3, 0])
    assert scaled[:2] == samples[:2] and [s.weight for s in scaled] == [1, 1, 2, 2, 1]


def test_late_samples_share_the_limits_with_those_of_the_step() -> None:
    """Own 6, ant 3 in time. 0.4 of a total of 10 is 4, so one of ant's late samples is left, and all
    four of bee's. By weight: own 6, ant 3 x 1 and 5 x 2; a quarter of 8 is 2, which ant has already."""
    used = [sample("me", i) for i in range(6)] + [sample("ant", i) for i in range(3)]
    late = [sample("ant", 10 + i, -1.0, 2.0) for i in range(5)]
    assert len(surplus(late, 0.4, 0, 0, before=used)) == 4
    assert not surplus([sample("bee", i) for i in range(4)], 0.4, 0, 0, before=used)  # 4 of 13
    assert cap_weights(late, 0.25, before=used)[1] == {"ant": 0}
    # Half: ant may have 6 and has 3, so 3 of its late 10.
    scaled, factors = cap_weights(late, 0.5, before=used)
    assert factors == {"ant": pytest.approx(0.3)}
    assert [s.advantage for s in scaled] == pytest.approx([-0.3] * 5)


def test_samples_over_the_ratio() -> None:
    """Claimed -0.5 per token. Their mean -0.1 is s = e^0.4 = 1.49; 0.2 is e^0.7 = 2.01."""
    found = [scored("ant", 0, -0.3, 0.1), scored("ant", 1, 0.2), scored("bee", 0, log(2) - 0.5)]
    assert over_ratio(found, 2.0) == {("ant", "q", 1)}
    assert len(over_ratio(found, 1.4)) == 3
    assert not over_ratio([replace(s, behaviour=None) for s in found], 1.4)  # no claim, no ratio


def test_samples_that_the_learner_would_hardly_write() -> None:
    """Own means -0.4, -0.3, -0.2, -0.1. The quantile 0.25 is -0.3, so -0.35 is left out; whatever the
    peer claims."""
    own = [scored("me", i, -0.1 * (i + 1)) for i in range(4)]
    peers = [scored("ant", 0, -0.2, -0.4), scored("ant", 1, -0.35), scored("bee", 0, -0.4)]
    peers[1] = replace(peers[1], behaviour=-50.0)
    assert unlikely(own, peers, 0.25) == {("ant", "q", 1), ("bee", "q", 0)}
    assert not unlikely(own, peers, 0.0)
    assert not unlikely([], peers, 0.5)  # no own samples, no limit
