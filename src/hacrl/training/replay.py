"""An agent that publishes the stored trajectories of another run instead of sampling."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.timing import Clock
from hacrl.training.trajectories import not_attempted
from hacrl.trust.publish import public_rows
from hacrl.types import Finish, Sampling, Trajectory
from hacrl.verify.settings import judging_options

if TYPE_CHECKING:
    from hacrl.training.local import Shared


class ReplayAgent:
    """Publishes, for each problem of a step, the stored trajectories of that problem: those of the
    same step if there are any, else the newest. A problem that the stored run never saw is "not
    attempted"."""

    def __init__(self, agent: AgentConfig, shared: Shared) -> None:
        self.name, self.agent, self.config = agent.name, agent, shared.config
        self.task, self.pool, self.verifier = shared.task, shared.pool, shared.verifier.label
        self.clock = Clock()
        self.notes: list[str] = []
        self.stored = self._load(RunDirectory.open(Path(agent.replay or "")))

    def _load(self, run: RunDirectory) -> dict[str, dict[int, list[Trajectory]]]:
        """The stored trajectories by problem and step."""
        names = [a.name for a in run.config().agents]
        source = self.agent.replay_agent or (names[0] if len(names) == 1 else None)
        if source not in names:
            raise UserError(
                f"agent {self.name!r}: replay_agent = {self.agent.replay_agent!r}, but the run "
                f"{run.path} has {', '.join(names)}. Name one of them."
            )
        theirs, ours = (judging_options(c.verifier) for c in (run.config(), self.config))
        if theirs != ours:
            raise UserError(
                f"agent {self.name!r}: the run {run.path} was judged with verifier.options = {theirs}, "
                f"this run has {ours}. Both must be the same."
            )
        stored: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
        unreadable: list[str] = []
        pool = Pool(run.pool_path, read_only=True)
        for t in pool.rows(agent=source, report=unreadable.append):
            if t.finish is not Finish.NOT_ATTEMPTED:
                self._check(t)
                stored[t.problem_id][t.step].append(t)
        if unreadable:
            self.notes.append(
                f"agent {self.name!r} leaves out {len(unreadable)} stored rows of {run.path} that "
                f"cannot be read. The first: {unreadable[0]}."
            )
        if not stored:
            raise UserError(
                f"agent {self.name!r}: the run {run.path} has no trajectories of {source!r}; "
                "there is nothing to replay."
            )
        return stored

    def _check(self, t: Trajectory) -> None:
        """Raise a UserError if rewards or log-probabilities of the run mean something else here."""
        theirs, ours = t.sampling.temperature, self.config.temperature
        if (t.verifier, theirs) != (self.verifier, ours):
            raise UserError(
                f"agent {self.name!r}: the run {self.agent.replay} was judged by {t.verifier!r} and "
                f"sampled at temperature {theirs:g}, this run has temperature = {ours:g} and the "
                f"verifier {self.verifier!r}. Both must be the same."
            )

    def restore(self, steps: object) -> None:
        """Nothing to restore: this agent has no weights."""

    def republish(self, step: int) -> None:
        """Publish a step again, because its batch is damaged."""
        self.rollout(step)

    def rollout(self, step: int) -> dict[str, Any]:
        """Publish the step's trajectories and return metrics."""
        # A published batch stays as it is, even if the stored run has grown since.
        if self.pool.whole(step, self.name):
            rows = list(self.pool.rows(self.name, step))
        else:
            private = self.config.trust.judge_again
            rows = public_rows(self._choose(step), self.agent.publish, private)
        self.pool.publish(step, self.name, rows)
        rewards = [t.reward for t in rows if t.judged]
        return {
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "rollouts": 0,
            "replayed": len(rewards),
            "not_attempted": sum(t.finish is Finish.NOT_ATTEMPTED for t in rows),
        }

    def _choose(self, step: int) -> list[Trajectory]:
        rows: list[Trajectory] = []
        for problem in self.task.batch(step, self.config.problems_per_step):
            by_step = self.stored.get(problem.id, {})
            found = by_step.get(step) or (by_step[max(by_step)] if by_step else [])
            for i, t in enumerate(found[: self.config.samples_of(self.agent)]):
                rows.append(replace(t, agent=self.name, step=step, index=i, task=problem.task))
            if not found:
                nothing = Sampling(self.config.temperature, 0)
                rows.append(not_attempted(problem, self.name, step, nothing))
        return rows
