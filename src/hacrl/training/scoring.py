"""The trainer's log-probabilities of rollouts, and their agreement with the sampler's."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from hacrl.errors import RunStopped
from hacrl.policy.policy import Policy
from hacrl.store.journal import Journal
from hacrl.types import Rollout, Sample

ROUNDING = "agreement/rounding"
"""Standard deviation of the rounding of one token's log-probability, measured in half precision."""


def score_rollouts(
    policy: Policy, step: int, rollouts: Sequence[Rollout], tolerance: float | None
) -> tuple[list[Rollout], dict[str, float]]:
    """Put the trainer's log-probabilities in the place of the sampler's, and measure how much they
    differ. RunStopped if a sequence's mean differs by more than `tolerance` on average; None: by more
    than rounding explains."""
    scores = policy.score([(r.prompt_ids, r.completion.token_ids) for r in rollouts])
    scored = [
        replace(r, completion=replace(r.completion, logprobs=tuple(s)))
        for r, s in zip(rollouts, scores, strict=True)
    ]
    facts, rounding = agreement(rollouts, scored)
    facts |= getattr(policy.sampler, "facts", dict)()  # of a sampler with a copy of the weights
    # bfloat16 moves a short reply's mean by a few hundredths.
    gap, allowed = facts["agreement/mean_gap"], tolerance or (0.05 if policy.half else 1e-4)
    if math.isnan(gap):
        raise RunStopped(
            f"agent {policy.agent.name!r}: log-probabilities are not numbers (nan): the weights have "
            "diverged. Lower the learning rate and start again, or resume from an older checkpoint."
        )
    if gap > allowed:
        raise RunStopped(
            f"agent {policy.agent.name!r}: sampler and trainer differ by {gap:.3g} in a sequence's mean "
            f"log-probability, averaged over {len(scored)} sequences (allowed: {allowed:g}). The "
            "sampler's weights are stale, or the two compute different functions. If that is the "
            "rounding of your model, raise sampler.tolerance."
        )
    policy.mark_scored(step, rounding)
    return scored, {**facts, **({ROUNDING: rounding} if policy.half else {})}


def agreement(
    sampled: Sequence[Rollout], scored: Sequence[Rollout]
) -> tuple[dict[str, float], float]:
    """Differences of a sequence's mean log-probability between sampler and trainer, and the standard
    deviation of the rounding of one token. Both have the same weights, but different kernels, so they
    differ by rounding; the mean over n tokens has a variance n times smaller."""
    gaps = [abs(a.mean_logprob - b.mean_logprob) for a, b in zip(sampled, scored, strict=True)]
    facts = {
        "agreement/max_gap": max(gaps, default=0.0),
        "agreement/mean_gap": fmean(gaps) if gaps else 0.0,
    }
    squares = [g**2 * len(r.completion.token_ids) for g, r in zip(gaps, sampled, strict=True)]
    return facts, fmean(squares) ** 0.5 if squares else 0.0


def recall_scores(policy: Policy, journal: Journal, step: int) -> None:
    """Half precision: if this process did not score the step's replies, take the rounding of their
    scores from the journal. Relearned weights are those that scored: a resume with changed inputs
    samples again. A step that was closed without the agent has the rounding of the step before."""
    if policy.half and not policy.has_scored(step):
        newest = max((s for s in journal.steps() if s <= step), default=step)
        facts = (journal.read(newest) or ([], {}))[1]
        if ROUNDING in facts:
            policy.mark_scored(step, facts[ROUNDING])


def score_peers(policy: Policy, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that the policy's weights give to those of peers."""
    peers = [s for s in samples if not s.is_own]
    pairs = [(s.prompt_ids, s.token_ids[len(s.prompt_ids) :]) for s in peers]
    scores = policy.score(pairs)
    scored = iter(replace(s, old_logprobs=tuple(x)) for s, x in zip(peers, scores, strict=True))
    return [s if s.is_own else next(scored) for s in samples]
