"""Held-out evaluation: each agent alone, every reply kept.

The noise of an evaluation does not depend on the step, so two evaluations of one agent, or of two
runs with one seed, differ by the weights alone: differences can be taken problem by problem.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.statistics import Estimate, estimate
from hacrl.store.files import write_atomic
from hacrl.store.reader import mean_rewards
from hacrl.training.attempt import attempt, judge, split_by_length
from hacrl.types import Finish, Problem, Rollout, Status
from hacrl.verify import VerifierPool

EVALUATION = -1
"""The step that names evaluation's noise streams."""


@dataclass(frozen=True)
class Evaluation:
    """One agent on one set of problems.

    Example: Evaluation(agent="wren", step=20, samples=4, score=Estimate(0.61, 0.55, 0.67, 200), ...)
    """

    agent: str
    step: int
    samples: int
    """Replies a problem."""
    score: Estimate | None
    """Mean over problems of the mean reward of its judged replies: avg@k. None when nothing could be
    judged: a broken verifier must not look like a weak model."""
    by_task: Mapping[str, float]
    verdicts: Mapping[str, int]
    not_attempted: int
    reply_tokens: float
    truncated: float
    """Share of replies cut at the limit."""

    def metrics(self) -> dict[str, Any]:
        return {
            "accuracy": self.score.mean if self.score else None,
            "accuracy/low": self.score.low if self.score else None,
            "accuracy/high": self.score.high if self.score else None,
            "problems": self.score.count if self.score else 0,
            **{f"accuracy/{task}": value for task, value in self.by_task.items()},
            **{f"verdict/{status}": n for status, n in self.verdicts.items()},
            "not_attempted": self.not_attempted,
            "reply_tokens": self.reply_tokens,
            "truncated": self.truncated,
        }


def evaluate(
    policy: Policy,
    problems: Sequence[Problem],
    verifier: VerifierPool,
    *,
    agent: str,
    step: int,
    seed: int,
    samples: int,
    temperature: float,
    prompt_limit: int,
    limit: int,
) -> tuple[Evaluation, list[Rollout]]:
    """Let the agent answer every problem `samples` times and judge the replies. A problem that is
    too long for the agent counts as not solved."""
    prompts, too_long = split_by_length(policy, problems, prompt_limit)
    rollouts = attempt(
        policy,
        prompts,
        step=step,
        samples=samples,
        key=lambda problem_id, i: stream_key(seed, agent, EVALUATION, problem_id, i),
        temperature=temperature,
        limit=limit,
    )
    rollouts = judge(rollouts, problems, verifier, policy.agent.reply_start)
    scores = problem_scores(rollouts) | {p.id: 0.0 for p in too_long}
    task_scores = defaultdict(list)
    for problem in problems:
        if problem.id in scores:
            task_scores[problem.task].append(scores[problem.id])
    counts = Counter(r.verdict.status for r in rollouts if r.verdict)
    result = Evaluation(
        agent=agent,
        step=step,
        samples=samples,
        score=estimate(list(scores.values())) if scores else None,
        by_task={task: fmean(values) for task, values in sorted(task_scores.items())},
        verdicts={status.value: counts[status] for status in Status},
        not_attempted=len(too_long),
        reply_tokens=fmean([len(r.completion.token_ids) for r in rollouts] or [0]),
        truncated=fmean([float(r.completion.finish is Finish.LENGTH) for r in rollouts] or [0]),
    )
    return result, rollouts


def problem_scores(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean judged reward of each problem; a problem with no judged reply is left out."""
    verdicts = ((r.problem_id, r.verdict) for r in rollouts)
    return mean_rewards((p, v.reward if v and v.judged else None) for p, v in verdicts)


def write_evaluation(
    folder: Path, result: Evaluation, rollouts: Sequence[Rollout], problems: Sequence[Problem]
) -> None:
    """replies.jsonl, then result.json: a folder with a result is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = reply_rows(rollouts, problems, result.samples)
    write_atomic(folder / "replies.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_atomic(folder / "result.json", json.dumps(asdict(result), indent=2) + "\n")


def reply_rows(
    rollouts: Sequence[Rollout], problems: Sequence[Problem], samples: int
) -> list[dict[str, Any]]:
    """The lines of replies.jsonl: every reply with its problem and verdict. A problem that was not
    attempted has `samples` empty ones with reward 0, so that a recount sees it, too."""
    by_id = {p.id: p for p in problems}
    rows = [
        {
            **_problem_columns(by_id[r.problem_id]),
            "index": r.index,
            "reply": r.completion.text,
            "finish": r.completion.finish,
            "tokens": len(r.completion.token_ids),
            "reward": r.verdict.reward if r.verdict and r.verdict.judged else None,
            "status": r.verdict.status if r.verdict else None,
            "detail": r.verdict.detail if r.verdict else None,
        }
        for r in rollouts
    ]
    attempted = {r.problem_id for r in rollouts}
    empty = {"reply": "", "finish": Finish.NOT_ATTEMPTED, "tokens": 0, "reward": 0.0}
    rows += [
        {**_problem_columns(p), "index": i, **empty, "status": None, "detail": None}
        for p in problems
        if p.id not in attempted
        for i in range(samples)
    ]
    return rows


def _problem_columns(problem: Problem) -> dict[str, Any]:
    return {
        "problem": problem.id,
        "task": problem.task,
        "question": problem.messages[-1].content,
        "answer": problem.answer,
    }
