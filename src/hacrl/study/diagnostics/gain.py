"""First-order gain: the change of the learner's held-out reward by one step of a source's samples.

    gain(j) = U_j < grad J, d_j >,   grad p(q) ~ 1/S sum_i (R_i - mean of R without i) grad log pi(y_i)

d_j is the displacement by source j's part of one update of its block (gradients.py), U_j the number
of such updates in a step, S the number of fresh replies. docs/diagnostics.md explains the estimate.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from hacrl.errors import UserError
from hacrl.policy.policy import Policy
from hacrl.study.diagnostics.baseline import standard_error
from hacrl.study.diagnostics.gradients import Directions, dot
from hacrl.tasks import Task
from hacrl.tasks.deck import hash_number
from hacrl.types import LossOutput, MicroBatch, Problem, Rollout, Sample, Update

LOOK_AHEAD = 50  # number of coming steps that are searched for problems that no update has used yet


class UnseenProblems:
    """Problems for the gain: different at every check, equal for all arms and agents of one seed.

    They are the task's held-out problems without those of the evaluation. If there are too few, they
    are training problems of coming steps that no earlier step has used.
    """

    def __init__(self, task: Task, seed: int, prompts_per_step: int, evaluated: int | None) -> None:
        self.task, self.seed, self.prompts = task, seed, prompts_per_step
        try:
            reported = {p.id for p in task.held_out(evaluated)} if evaluated != 0 else set()
            self.spare = [p for p in task.held_out(None) if p.id not in reported]
        except UserError:  # a task without held-out problems
            self.spare = []

    def at(self, step: int, count: int) -> tuple[list[Problem], bool]:
        """Problems for the check of `step`, and whether they are held-out problems."""
        if len(self.spare) >= count:
            chosen = sorted(
                self.spare, key=lambda p: hash_number("diagnostics", self.seed, step, p.id)
            )
            return chosen[:count], True
        earlier = (self.task.batch(i, self.prompts) for i in range(step + 1))
        used = {problem.id for batch in earlier for problem in batch}
        coming: dict[str, Problem] = {}
        for later in range(step + 1, step + 1 + LOOK_AHEAD):
            for problem in self.task.batch(later, self.prompts):
                if problem.id not in used and len(coming) < count:
                    coming[problem.id] = problem
            if len(coming) == count:
                break
        return list(coming.values()), False


def reinforce(batch: MicroBatch, update: Update) -> LossOutput:
    """Minus the mean over samples of advantage x log-probability of the whole reply."""
    total_B = (batch.logprobs_BT * batch.mask_BT).sum(1)
    loss = -(batch.advantage_B * total_B).sum() / batch.num_samples
    return LossOutput(loss, torch.ones_like(total_B), torch.ones_like(total_B))


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the others.

    Example: leave_one_out([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]
    """
    total, others = sum(rewards), len(rewards) - 1
    return [r - (total - r) / others for r in rewards]


def problem_gains(
    policy: Policy, rollouts: Sequence[Rollout], found: Directions, learner: str
) -> dict[str, list[float]]:
    """For each source, the gain of one step of its samples on each problem. `rollouts` are judged, at
    least two per problem."""
    by_problem: dict[str, list[Rollout]] = {}
    for r in rollouts:
        by_problem.setdefault(r.problem_id, []).append(r)
    gains: dict[str, list[float]] = {source: [] for source in found.moves}
    for problem_id, replies in by_problem.items():
        samples = _samples(replies, learner)
        update = Update(0, 0.5, "own", (problem_id,))
        gradient = policy.gradient(samples, range(len(samples)), reinforce, update)
        for source, move in found.moves.items():
            gains[source].append(-found.updates[source] * dot(gradient, move))
    return gains


def _samples(replies: Sequence[Rollout], learner: str) -> list[Sample]:
    rewards = [r.verdict.reward for r in replies if r.verdict is not None]
    return [
        Sample(
            problem_id=r.problem_id,
            index=r.index,
            source=learner,
            is_own=True,
            token_ids=r.prompt_ids + r.completion.token_ids,
            loss_mask=(0,) * len(r.prompt_ids) + (1,) * len(r.completion.token_ids),
            behaviour=None,
            advantage=advantage,
        )
        for r, advantage in zip(replies, leave_one_out(rewards), strict=True)
    ]


def gain_metrics(gains: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Mean and standard error over problems, for each source with a gain."""
    metrics: dict[str, float | None] = {}
    for source, values in gains.items():
        if values:
            metrics[f"diagnostics/gain/{source}"] = fmean(values)
            metrics[f"diagnostics/gain_se/{source}"] = standard_error(values)
    return metrics
