"""A policy attempts problems: prompts, replies, texts. Used by training and by evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.types import Completion, Finish, Problem, Rollout, Verdict
from hacrl.verify import VerifierPool


def split_by_length(
    policy: Policy, problems: Sequence[Problem], prompt_limit: int
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """The prompts that fit, by problem id, and the problems that are "not attempted"."""
    prompts = {p.id: policy.renderer.prompt(p.messages) for p in problems}
    too_long = [p for p in problems if len(prompts[p.id]) > prompt_limit]
    for problem in too_long:
        del prompts[problem.id]
    return prompts, too_long


def attempt(
    policy: Policy,
    prompts: dict[str, tuple[int, ...]],
    *,
    step: int,
    samples: int,
    key: Callable[[str, int], int],
    temperature: float,
    limit: int | Mapping[str, int],
) -> list[Rollout]:
    """`samples` replies to every prompt; `key` names the noise stream of (problem id, index);
    `limit` is one for all or one by problem id."""
    wanted = [(problem_id, i) for problem_id in prompts for i in range(samples)]
    limits = dict.fromkeys(prompts, limit) if isinstance(limit, int) else limit
    replies = policy.sampler.sample(
        [Request(prompts[p], key(p, i), limits[p]) for p, i in wanted], temperature
    )
    texts = policy.renderer.texts(
        (prompts[p], reply.token_ids) for (p, _), reply in zip(wanted, replies, strict=True)
    )
    rollouts = []
    for (problem_id, i), reply, (text, shareable) in zip(wanted, replies, texts, strict=True):
        finish = Finish.STOP if reply.stopped else Finish.LENGTH
        completion = Completion(text, reply.token_ids, reply.logprobs, finish)
        rollouts.append(
            Rollout(problem_id, i, step, prompts[problem_id], completion, None, shareable)
        )
    return rollouts


def judge(
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    verifier: VerifierPool,
    reply_start: str,
) -> list[Rollout]:
    """The rollouts with their verdicts; a verifier reads the whole reply, the begun part included."""
    by_id = {p.id: p for p in problems}
    verdicts: list[Verdict] = verifier.judge_all(
        [(reply_start + r.completion.text, by_id[r.problem_id]) for r in rollouts]
    )
    return [replace(r, verdict=v) for r, v in zip(rollouts, verdicts, strict=True)]
