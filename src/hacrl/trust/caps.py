"""Which samples of peers are too many, too unlikely or too heavy for a learner (docs/security.md)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import floor, inf, log
from statistics import fmean

from hacrl.noise import stream_key
from hacrl.types import Sample

Key = tuple[str, str, int]  # source, problem and index of a sample


def key_of(sample: Sample) -> Key:
    return sample.source, sample.problem_id, sample.index


def limits(own: float, peers: Mapping[str, float], fraction: float) -> dict[str, float]:
    """The peers to reduce, each with its new amount: `fraction` of the total that is left after all of
    them are reduced. Own amounts are never reduced.

    Example: limits(40, {"ant": 50, "bee": 10}, 0.25) == {"ant": 50 / 3}, of a total of 200 / 3
    """
    reduced: set[str] = set()
    while True:
        rest = own + sum(amount for name, amount in peers.items() if name not in reduced)
        largest = fraction * rest / (1 - fraction * len(reduced))
        over = {n for n, amount in peers.items() if n not in reduced and amount > largest}
        if not over:
            return dict.fromkeys(sorted(reduced), largest)
        reduced |= over


def log_ratio(sample: Sample) -> float | None:
    """log s of a scored sample; None if its source published no log-probability."""
    if sample.behaviour is None or not sample.old_logprobs:
        return None
    return fmean(sample.old_logprobs) - sample.behaviour


def over_ratio(scored: Iterable[Sample], most: float) -> set[Key]:
    """Samples with a ratio s above `most`."""
    found = ((s, log_ratio(s)) for s in scored)
    return {key_of(s) for s, x in found if x is not None and x > log(most)}


def unlikely(own: Iterable[Sample], scored: Iterable[Sample], quantile: float) -> set[Key]:
    """Samples whose mean log-probability at the learner's weights is below this quantile of the own
    samples'."""
    means = sorted(fmean(s.old_logprobs) for s in own if s.old_logprobs)
    least = means[int(quantile * len(means))] if means else -inf
    return {key_of(s) for s in scored if s.old_logprobs and fmean(s.old_logprobs) < least}


def surplus(
    samples: Sequence[Sample], fraction: float, seed: int, step: int, before: Sequence[Sample] = ()
) -> set[Key]:
    """Peers' samples to leave out so that no peer has more than `fraction` of those that are left. A
    seeded hash chooses them. `before` are samples that are used in any case and count, too."""
    taken = Counter(s.source for s in before if not s.is_own)
    counts = taken + Counter(s.source for s in samples if not s.is_own)
    own = len(before) + len(samples) - counts.total()
    dropped: set[Key] = set()
    for source, most in limits(own, counts, fraction).items():
        theirs = [s for s in samples if s.source == source and not s.is_own]
        theirs.sort(key=lambda s: stream_key(seed, s.source, step, s.problem_id, s.index))
        dropped.update(map(key_of, theirs[max(0, floor(most + 1e-9) - taken[source]) :]))
    return dropped


def cap_weights(
    samples: Sequence[Sample], fraction: float, before: Sequence[Sample] = ()
) -> tuple[list[Sample], dict[str, float]]:
    """Scale down the advantages of peers until none has more than `fraction` of the sum of
    |advantage x weight|. `before` are samples that count, too, and are not scaled. Also returns the
    factor of each peer that was scaled."""
    own, theirs = _amounts(samples)
    own_before, taken = _amounts(before)
    total = {name: taken[name] + theirs[name] for name in {**taken, **theirs}}
    factors = {
        name: max(0.0, most - taken[name]) / theirs[name]
        for name, most in limits(own_before + own, total, fraction).items()
        if theirs[name]
    }
    scaled = [
        replace(s, advantage=s.advantage * factors[s.source])
        if s.source in factors and not s.is_own
        else s
        for s in samples
    ]
    return scaled, factors


def _amounts(samples: Iterable[Sample]) -> tuple[float, defaultdict[str, float]]:
    """The sum of |advantage x weight| of own samples, and by source of the others."""
    own, peers = 0.0, defaultdict[str, float](float)
    for s in samples:
        amount = abs(s.advantage * s.weight)
        if s.is_own:
            own += amount
        else:
            peers[s.source] += amount
    return own, peers
