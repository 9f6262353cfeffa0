"""Upper bounds of what one peer may contribute to a learner's step (trust.max_source_*)."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, floor, inf, log, sqrt
from statistics import fmean

from hacrl.noise import stream_key
from hacrl.types import Sample


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


def cap_ratios(
    samples: Sequence[Sample], scored: Iterable[Sample], most: float
) -> tuple[list[Sample], Counter[str]]:
    """Leave out peers' samples with a ratio s above `most`. `scored` are peers' samples with the
    learner's log-probabilities. Also returns the number left out, by source."""
    found = ((s, log_ratio(s)) for s in scored)
    return _without(samples, (s for s, x in found if x is not None and x > log(most)))


def cap_unlikely(
    samples: Sequence[Sample],
    scored: Iterable[Sample],
    quantile: float,
    before: Sequence[Sample] = (),
) -> tuple[list[Sample], Counter[str]]:
    """Leave out peers' samples whose mean log-probability at the learner's weights is below this
    quantile of the own samples', which may be in `before`. `scored` and the result are as for
    cap_ratios."""
    mine = (s for s in (*before, *samples) if s.is_own)
    own = sorted(fmean(s.old_logprobs) for s in mine if s.old_logprobs)
    least = own[int(quantile * len(own))] if own else -inf
    return _without(
        samples, (s for s in scored if s.old_logprobs and fmean(s.old_logprobs) < least)
    )


def _without(
    samples: Sequence[Sample], dropped: Iterable[Sample]
) -> tuple[list[Sample], Counter[str]]:
    """The samples that are not dropped, and the number of the others by source."""
    gone = {(s.source, s.problem_id, s.index) for s in dropped}
    kept = [s for s in samples if s.is_own or (s.source, s.problem_id, s.index) not in gone]
    return kept, Counter(s.source for s in samples) - Counter(s.source for s in kept)


def cap_samples(
    samples: Sequence[Sample], fraction: float, seed: int, step: int, before: Sequence[Sample] = ()
) -> tuple[list[Sample], Counter[str]]:
    """Leave out peers' samples until no peer has more than `fraction` of those that are left. A seeded
    hash chooses them. `before` are samples that are used in any case and count, too. Also returns the
    number left out, by source."""
    taken = Counter(s.source for s in before if not s.is_own)
    counts = taken + Counter(s.source for s in samples if not s.is_own)
    own = len(before) + len(samples) - counts.total()
    left_out: Counter[str] = Counter()
    dropped: set[int] = set()
    for source, most in limits(own, counts, fraction).items():
        theirs = [s for s in samples if s.source == source and not s.is_own]
        theirs.sort(key=lambda s: stream_key(seed, s.source, step, s.problem_id, s.index))
        surplus = theirs[max(0, floor(most + 1e-9) - taken[source]) :]
        dropped.update(map(id, surplus))
        left_out[source] = len(surplus)
    return [s for s in samples if id(s) not in dropped], left_out


def cap_weights(
    samples: Sequence[Sample],
    fraction: float,
    before: Sequence[Sample] = (),
    size: Callable[[Sample], float] = lambda sample: 1.0,
) -> tuple[list[Sample], dict[str, float]]:
    """Scale down the advantages of peers until none has more than `fraction` of the sum of
    |advantage x weight| x size. `before` are samples that count, too, and are not scaled. Also returns
    the factor of each peer that was scaled."""
    own, theirs = _amounts(samples, size)
    own_before, taken = _amounts(before, size)
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


def gradient_size(logprobs: Sequence[float]) -> float:
    """Estimate of the norm of the gradient of a reply's mean log-probability, up to a factor that all
    replies share: a token of probability p counts 1 - p, and the tokens' gradients are orthogonal.

    Example: gradient_size([log(0.5), log(0.5)]) == sqrt(0.25 + 0.25) / 2
    """
    return sqrt(sum((1 - exp(x)) ** 2 for x in logprobs)) / len(logprobs) if logprobs else 0.0


def _amounts(
    samples: Iterable[Sample], size: Callable[[Sample], float]
) -> tuple[float, defaultdict[str, float]]:
    """The sum of |advantage x weight| x size of own samples, and by source of the others."""
    own, peers = 0.0, defaultdict[str, float](float)
    for s in samples:
        amount = abs(s.advantage * s.weight) * size(s)
        if s.is_own:
            own += amount
        else:
            peers[s.source] += amount
    return own, peers
