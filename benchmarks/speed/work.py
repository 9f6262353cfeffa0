"""Rollout, scoring and update, each by itself on one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from hacrl.algorithms import make_settings
from hacrl.algorithms.gspo import Gspo
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Reply
from hacrl.types import Sample, Update
from speed.floor import (
    Ceilings,
    cost_of,
    rollout_floor,
    score_floor,
    update_floor,
)
from speed.generate import generate_rows
from speed.measure import Log, Measurement, Timed, free, timed
from speed.shapes import PAD, make_policy, vocabulary_of
from speed.workload import Trace, make_trace

SETTINGS = make_settings("gspo")


@dataclass(frozen=True)
class Case:
    """A model and the replies it writes; `rows` side by side."""

    shape: str
    prompts: int
    rows: int
    variant: str = "short"
    length: int | None = None
    scale: float = 1.0
    generate: bool = True
    """Whether `generate` takes part: all replies in one batch, which runs to its longest."""

    def trace(self) -> Trace:
        return make_trace(
            self.variant,
            self.prompts,
            vocabulary_of(self.shape),
            length=self.length,
            scale=self.scale,
        )


@dataclass
class Setting:
    """What every part is given."""

    device: torch.device
    ceilings: Ceilings
    log: Log
    repeats: int = 3
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the agents (AgentConfig) other than the defaults."""
    generate: bool = True
    """Whether `generate` takes part at all."""


def ways_of(policy: Policy, sampler: Any = None) -> dict[str, Any]:
    """How the policy works: packed or padded, with small parts compiled or not, and whose cache holds
    keys and values. Where a check refuses the fast way the slow one is taken, and this shows it."""
    sampler = sampler or policy.sampler
    return {
        "packs": policy.logprobs.packs,
        "fused": policy.logprobs.fusion is not None,
        "sampler": getattr(sampler, "cache_kind", type(sampler).__name__),
    }


def ways_text(ways: Mapping[str, Any]) -> str:
    """e.g. packed, compiled, pages; without a cache that was not used yet"""
    parts = [
        "packed" if ways["packs"] else "padded",
        "compiled" if ways["fused"] else "not compiled",
    ]
    return ", ".join(parts + [ways["sampler"]] * (ways["sampler"] != "unknown"))


def rows_of(setting: Setting, case: Case) -> int:
    """How many replies hacrl writes side by side."""
    return setting.fields.get("sampler_rows", case.rows)


def policy_of(setting: Setting, case: Case) -> Policy:
    return make_policy(case.shape, setting.device, **{"sampler_rows": case.rows, **setting.fields})


def rollout(setting: Setting, cases: list[Case]) -> None:
    """Tokens written a second, prefill and sampling included."""
    policy: Policy | None = None
    for case in cases:
        if policy is None or policy.source != case.shape:
            policy = None
            free(setting.device)
            setting.log.say(f"rollout: building {case.shape}")
            policy = policy_of(setting, case)
        setting.log.add(measure_rollout(setting, case, policy))
    del policy
    free(setting.device)


def measure_rollout(setting: Setting, case: Case, policy: Policy) -> Measurement:
    """hacrl's rollout of one case, and `generate` on the same requests if it takes part."""
    trace, device, rows = case.trace(), setting.device, policy.agent.sampler_rows
    ours = timed(
        lambda i: policy.sampler.sample(trace.requests(i), 1.0),
        device,
        repeats=setting.repeats,
        warm=2,  # steps are captured in the first, and again with compiled parts in the second
    )
    wanted = [n for _, n in trace.rows]
    assert [len(r.token_ids) for r in ours.result] == wanted, "replies of other lengths than asked"
    peer = None
    if case.generate and setting.generate:
        setting.log.say(f"rollout: generate on {case.shape}, {trace.name}")
        requests = trace.requests(0)
        generate_rows(policy.model, [replace(r, limit=4) for r in requests], PAD)  # warm up
        peer = timed(
            lambda _: generate_rows(policy.model, requests, PAD),
            device,
            repeats=1,
            warm=0,
        )
    floor = rollout_floor(cost_of(policy.model), trace, rows, setting.ceilings)
    sequences = [(p, r.token_ids) for (p, _), r in zip(trace.rows, ours.result, strict=True)]
    scores = policy.score(sequences)
    agreed, ways = agreement(ours.result, scores), ways_of(policy)
    return Measurement(
        "rollout",
        f"{case.shape}, {len(wanted)} replies, {rows} rows, {trace.name}",
        ours.seconds,
        trace.reply_tokens,
        ours.peak_gb,
        reply_tokens=trace.reply_tokens,
        against_generate=peer.seconds / ours.seconds if peer else None,
        of_floor=floor / ours.seconds,
        note=f"gap {agreed['mean_gap']:.1e}, largest {agreed['largest_gap']:.1e}; "
        + ways_text(ways),
        facts={
            **ways,
            "first_s": ours.first,
            "spread": ours.spread,
            "floor_s": floor,
            "generate_s": peer.seconds if peer else None,
            "generate_peak_gb": peer.peak_gb if peer else None,
            **agreed,
        },
    )


def agreement(replies: list[Reply], scores: list[list[float]]) -> dict[str, float]:
    """Between sampler and trainer, in a sequence's mean log-probability; and how many own samples
    the clip would lose at the first update if the sampler's were taken as behaviour."""
    gaps = [fmean(s) - fmean(r.logprobs) for r, s in zip(replies, scores, strict=True)]
    low, high = SETTINGS.epsilon_low, SETTINGS.epsilon_high
    outside = [not -low <= torch.tensor(g).expm1().item() <= high for g in gaps]
    return {
        "largest_gap": max(map(abs, gaps)),
        "mean_gap": fmean(map(abs, gaps)),
        "outside_clip_by_sampler": fmean(map(float, outside)),
    }


def score_and_update(setting: Setting, case: Case, parts: set[str]) -> None:
    """Log-probabilities of given sequences, and one update on them, all of them with gradient."""
    device, trace = setting.device, case.trace()
    setting.log.say(f"score, update: building {case.shape}")
    _score_and_update(setting, case, parts, trace, policy_of(setting, case))
    free(device)


def _score_and_update(
    setting: Setting, case: Case, parts: set[str], trace: Trace, policy: Policy
) -> None:
    device = setting.device
    replies = _random_replies(trace, vocabulary_of(case.shape))
    sequences = [(p, r) for (p, _), r in zip(trace.rows, replies, strict=True)]
    cost = cost_of(policy.model)
    named = f"{case.shape}, {len(sequences)} sequences, {trace.name}"
    ways = ways_of(policy)
    facts: dict[str, Any] = {"sequences_tokens": trace.tokens, **ways}
    scored: Timed = timed(lambda _: policy.score(sequences), device, repeats=setting.repeats)
    if "score" in parts:
        setting.log.add(
            Measurement(
                "score",
                named,
                scored.seconds,
                trace.tokens,
                scored.peak_gb,
                of_floor=score_floor(cost, trace, setting.ceilings) / scored.seconds,
                note=ways_text(ways),
                facts={**facts, "first_s": scored.first, "spread": scored.spread},
            )
        )
    if "update" in parts:
        loss = Gspo(SETTINGS, (0.0, 1.0)).loss
        samples = _samples(trace, replies, scored.result)
        update = Update(0, 0.8, "own", tuple(dict.fromkeys(s.problem_id for s in samples)))
        done = timed(
            lambda _: policy.update(samples, loss, update), device, repeats=setting.repeats
        )
        report = done.result
        setting.log.add(
            Measurement(
                "update",
                named,
                done.seconds,
                trace.tokens,
                done.peak_gb,
                of_floor=update_floor(cost, trace, setting.ceilings) / done.seconds,
                note=ways_text(ways),
                facts={
                    **facts,
                    "first_s": done.first,
                    "spread": done.spread,
                    "outside_clip": _outside(report.ratios),
                },
            )
        )


def _outside(ratios: tuple[float | None, ...]) -> float:
    """Share of own samples outside the clip; their behaviour is the trainer's, so it should be 0."""
    low, high = 1 - SETTINGS.epsilon_low, 1 + SETTINGS.epsilon_high
    return fmean(float(r is not None and not low <= r <= high) for r in ratios)


def _random_replies(trace: Trace, vocabulary: int) -> list[tuple[int, ...]]:
    drawn = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(0, vocabulary, (n,), generator=drawn).tolist()) for _, n in trace.rows
    ]


def _samples(
    trace: Trace, replies: list[tuple[int, ...]], scores: list[list[float]]
) -> list[Sample]:
    """With advantages of both signs and none of 0, so that nothing is skipped."""
    keys = [(p, i) for p, ns in enumerate(trace.lengths) for i in range(len(ns))]
    return [
        Sample(
            problem_id=str(p),
            index=i,
            source="bench",
            is_own=True,
            token_ids=(*trace.prompts[p], *reply),
            loss_mask=(0,) * len(trace.prompts[p]) + (1,) * len(reply),
            behaviour=fmean(score),
            old_logprobs=tuple(score),
            advantage=1.0 if trace.rewards[p][i] else -1.0,
        )
        for (p, i), reply, score in zip(keys, replies, scores, strict=True)
    ]
