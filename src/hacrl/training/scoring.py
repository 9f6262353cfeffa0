"""The trainer's log-probabilities of rollouts, and their agreement with the sampler's."""

import math
from collections.abc import Sequence
from dataclasses import replace

from hacrl.config import Config
from hacrl.errors import RunStopped
from hacrl.policy.policy import Policy
from hacrl.store.journal import Journal
from hacrl.training.metrics import agreement_facts, token_rounding
from hacrl.types import Rollout, Sample

ROUNDING = "agreement/rounding"
"""Standard deviation of the rounding of one token's log-probability, measured in half precision."""


def score_rollouts(
    policy: Policy, config: Config, step: int, rollouts: Sequence[Rollout]
) -> tuple[list[Rollout], dict[str, float]]:
    """Put the trainer's log-probabilities in the place of the sampler's.

    With behaviour = "sampler" only a probe is scored, and the sampler's log-probabilities stay
    while the two agree (`AlgorithmSettings.logprob_tolerance`).
    """
    settings, name = config.sampler, policy.agent.name
    probe = list(rollouts)
    if settings.behaviour == "sampler":
        probe = probe[: settings.check_samples]
    scored = _scored(policy, probe)
    rounding = token_rounding(probe, scored)
    facts = agreement_facts(probe, scored)
    facts |= getattr(policy.sampler, "facts", dict)()  # of a sampler with a copy of the weights
    gap, allowed = facts["agreement/mean_gap"], settings.tolerance or _tolerance(policy)
    if math.isnan(gap):
        raise RunStopped(
            f"agent {name!r}: log-probabilities are not numbers (nan): the weights have "
            "diverged. Lower the learning rate and start again, or resume from an older checkpoint."
        )
    if not gap <= allowed:
        raise RunStopped(
            f"agent {name!r}: sampler and trainer differ by {gap:.3g} in a sequence's mean "
            f"log-probability, averaged over {len(probe)} sequences (allowed: {allowed:g}). The "
            "sampler's weights are stale, or the two compute different functions. If that is the "
            "rounding of your model, raise sampler.tolerance."
        )
    if settings.behaviour == "sampler":
        if facts["agreement/max_gap"] < config.algorithm.logprob_tolerance:
            return list(rollouts), facts
        scored = _scored(policy, rollouts)
    policy.mark_scored(step, rounding)
    return scored, {**facts, **({ROUNDING: rounding} if policy.half else {})}


def recall_scores(policy: Policy, journal: Journal, step: int) -> None:
    """Half precision: if this process did not score the step's replies, take the rounding of their
    scores from the journal. Relearned weights are those that scored: a resume with changed inputs
    samples again."""
    if policy.half and not policy.has_scored(step):
        facts = (journal.read(step) or ([], {}))[1]
        if ROUNDING in facts:
            policy.mark_scored(step, facts[ROUNDING])


def _tolerance(policy: Policy) -> float:
    """What rounding can explain: bfloat16 moves a short reply's mean by a few hundredths."""
    return 0.05 if policy.half else 1e-4


def _scored(policy: Policy, rollouts: Sequence[Rollout]) -> list[Rollout]:
    scores = policy.score([(r.prompt_ids, r.completion.token_ids) for r in rollouts])
    return [
        replace(r, completion=replace(r.completion, logprobs=tuple(s)))
        for r, s in zip(rollouts, scores, strict=True)
    ]


def score_peers(policy: Policy, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that the policy's weights give to those of peers."""
    peers = [s for s in samples if not s.is_own]
    split = [len(s.token_ids) - s.num_reply_tokens for s in peers]
    scores = policy.score(
        [(s.token_ids[:n], s.token_ids[n:]) for s, n in zip(peers, split, strict=True)]
    )
    scored = iter(replace(s, old_logprobs=tuple(x)) for s, x in zip(peers, scores, strict=True))
    return [s if s.is_own else next(scored) for s in samples]
