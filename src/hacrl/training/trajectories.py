"""Rollouts -> trajectories: what an agent publishes of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hacrl.types import Finish, Problem, Rollout, Sampling, Tokens, Trajectory, Turn

if TYPE_CHECKING:
    from hacrl.training.agent import Agent


def make_trajectories(
    agent: Agent,
    step: int,
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    attempted: Collection[str],
) -> list[Trajectory]:
    """Text and a few numbers of every rollout, and a "not attempted" for each problem whose id is not in
    `attempted`. Token ids and token log-probabilities only where the algorithm needs them."""
    config, settings = agent.config, agent.agent
    task_of = {p.id: p.task for p in problems}
    begun = (Turn("assistant", settings.reply_start, False),) if settings.reply_start else ()
    sampling = Sampling(config.temperature, config.response_limit(settings))
    tokenizer = agent.policy.renderer.vocabulary_hash
    with_tokens = agent.algorithm.needs.include("tokens")
    version = agent.steps_learned(step)
    rows = [
        Trajectory(
            problem_id=r.problem_id,
            task=task_of[r.problem_id],
            agent=agent.name,
            index=r.index,
            step=step,
            policy_version=version,
            turns=(*begun, Turn("assistant", r.completion.text, True)),
            finish=r.completion.finish,
            mean_logprob=r.mean_logprob,
            num_tokens=len(r.completion.token_ids),
            verdict=r.verdict and replace(r.verdict, parts=()),
            verifier=agent.verifier.label,
            sampling=sampling,
            shareable=r.shareable,
            tokenizer=tokenizer,
            tokens=Tokens(tokenizer, r.completion.token_ids, r.completion.logprobs)
            if with_tokens
            else None,
        )
        for r in rollouts
    ]
    others = (p for p in problems if p.id not in attempted)
    return rows + [not_attempted(p, agent.name, step, sampling) for p in others]


def not_attempted(problem: Problem, agent: str, step: int, sampling: Sampling) -> Trajectory:
    """The row of a problem whose prompt is too long for the agent."""
    return Trajectory(
        problem_id=problem.id,
        task=problem.task,
        agent=agent,
        index=0,
        step=step,
        policy_version=0,
        turns=(),
        finish=Finish.NOT_ATTEMPTED,
        mean_logprob=None,
        num_tokens=0,
        verdict=None,
        verifier="",
        sampling=sampling,
        shareable=False,
    )
