"""One theory check of one learner (docs/diagnostics.md).

A check runs between credit and the first update of a step, at the weights that drew its rollouts. It is
read-only: weights, optimizer and noise streams do not change, so a run with checks has the same metrics
as one without, except for `diagnostics/*`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hacrl.algorithms.capability import Capability
from hacrl.noise import order_key
from hacrl.store.rows import write_object
from hacrl.study.diagnostics.baseline import CHECKED, Guess, baseline_metrics, guesses
from hacrl.study.diagnostics.gain import UnseenProblems, gain_metrics, problem_gains
from hacrl.study.diagnostics.gradients import Directions, blocks, directions
from hacrl.training.agent import Agent
from hacrl.training.evaluate import attempt, judge, short_prompts
from hacrl.training.hooks import Hooks
from hacrl.types import Problem, Rollout, Sample, Snapshot


class Diagnostics:
    """The checks of one learner.

    Example: Diagnostics(agent).check(step, snapshot, problems, capability, samples)
    """

    def __init__(self, agent: Agent) -> None:
        assert agent.plan is not None
        self.config, self.agent, self.policy = agent.config, agent.agent, agent.policy
        self.algorithm, self.plan, self.run = agent.algorithm, agent.plan, agent.run
        self.settings, self.rate = agent.config.diagnostics, agent.rate
        self._task, self.verifier = agent.task, agent.verifier

    def check(
        self,
        step: int,
        snapshot: Snapshot,
        problems: Mapping[str, Problem],
        capability: Capability,
        samples: Sequence[Sample],
    ) -> dict[str, Any]:
        """Run a check and return its metrics, all named diagnostics/..."""
        ordered = sorted(problems, key=lambda p: (order_key(self.config.seed, step, p), p))
        asked = [problems[p] for p in ordered[: self.settings.problems]]
        rewards = _rewards(self._fresh(step, asked))
        guessed = {
            g.problem_id: guesses(g, capability, self.agent.name)
            for g in snapshot.groups
            if g.problem_id in {p.id for p in asked}
        }
        parts = blocks(self.plan, samples, ordered, self.rate(step))
        found = directions(self.policy, self.algorithm, parts, self.agent.name)
        unseen, held_out = self._unseen.at(step, self.settings.problems)
        replies = _at_least_two(self._fresh(step, unseen))
        gains = self.gains(replies, found)
        self._write(step, guessed, rewards, replies, gains)
        return {
            **baseline_metrics(guessed, rewards),
            **found.metrics,
            **gain_metrics(gains),
            "diagnostics/unseen/problems": len(_rewards(replies)),
            "diagnostics/unseen/held_out": float(held_out),
            CHECKED: self.settings.samples * (len(asked) + len(unseen)),
        }

    def gains(self, replies: Sequence[Rollout], found: Directions) -> dict[str, list[float]]:
        """For each source, the gain of one step of its samples on each problem of the replies."""
        return problem_gains(self.policy, replies, found, self.agent.name)

    @cached_property
    def _unseen(self) -> UnseenProblems:
        """Made at the first check, because a task may have many problems."""
        config, most = self.config, self.config.evaluation.most
        return UnseenProblems(self._task, config.seed, config.problems_per_step, most)

    def _fresh(self, step: int, problems: Sequence[Problem]) -> list[Rollout]:
        """Judged replies of the learner at its current weights, from separate noise streams."""
        prompts = short_prompts(self.policy, problems, self.config.prompt_limit(self.agent))
        rollouts = attempt(
            self.policy,
            prompts,
            seed=self.config.seed,
            step=step,
            samples=self.settings.samples,
            temperature=self.config.temperature,
            limit=self.config.response_limit(self.agent),
            purpose="/fresh",  # no agent's name has a slash
        )
        judged = judge(rollouts, problems, self.verifier, self.agent.reply_start)
        return [r for r in judged if r.verdict is not None and r.verdict.judged]

    def _write(
        self,
        step: int,
        guessed: Mapping[str, Mapping[str, Guess]],
        fresh: Mapping[str, Sequence[float]],
        replies: Sequence[Rollout],
        gains: Mapping[str, Sequence[float]],
    ) -> None:
        """Write one file per check, from which its metrics can be recomputed."""
        rows = {
            "baselines": {
                p: {
                    "fresh_rewards": list(fresh.get(p, ())),
                    **{name: [g.value, g.variance] for name, g in by_name.items()},
                }
                for p, by_name in guessed.items()
            },
            "unseen": {"fresh_rewards": _rewards(replies), "gains": gains},
        }
        folder = self.run.path / "diagnostics" / self.agent.name
        write_object(folder / f"step-{step:06d}.json", rows)


HOOKS = Hooks(diagnostics=Diagnostics)
"""The hooks of `hacrl train`."""


def _rewards(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Rewards by problem, in the order of the rollouts."""
    found: dict[str, list[float]] = {}
    for r in rollouts:
        assert r.verdict is not None
        found.setdefault(r.problem_id, []).append(r.verdict.reward)
    return found


def _at_least_two(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Drop problems with a single judged reply: its baseline would be empty."""
    enough = {p for p, rewards in _rewards(rollouts).items() if len(rewards) > 1}
    return [r for r in rollouts if r.problem_id in enough]
