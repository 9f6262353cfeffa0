"""Rollouts -> trajectories: what an agent publishes of a step."""

from collections.abc import Sequence
from dataclasses import replace

from hacrl.types import Finish, Problem, Rollout, Sampling, Tokens, Trajectory, Turn


def make_trajectories(
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    too_long: Sequence[Problem],
    *,
    agent: str,
    step: int,
    policy_version: int,
    sampling: Sampling,
    verifier: str,
    tokenizer: str,
    reply_start: str = "",
    with_tokens: bool = False,
) -> list[Trajectory]:
    """Text and a few numbers of every rollout, and a "not attempted" for each problem in
    `too_long`. Token ids and token log-probabilities only where `with_tokens`."""
    task_of = {p.id: p.task for p in problems}
    prefix = (Turn("assistant", reply_start, False),) if reply_start else ()
    attempted = [
        Trajectory(
            problem_id=r.problem_id,
            task=task_of[r.problem_id],
            agent=agent,
            index=r.index,
            step=step,
            policy_version=policy_version,
            turns=(*prefix, Turn("assistant", r.completion.text, True)),
            finish=r.completion.finish,
            mean_logprob=r.mean_logprob,
            num_tokens=len(r.completion.token_ids),
            verdict=r.verdict and replace(r.verdict, parts=()),
            verifier=verifier,
            sampling=sampling,
            shareable=r.shareable,
            tokenizer=tokenizer,
            tokens=Tokens(tokenizer, r.completion.token_ids, r.completion.logprobs)
            if with_tokens
            else None,
        )
        for r in rollouts
    ]
    return attempted + [not_attempted(p, agent, step, sampling) for p in too_long]


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
