"""An agent that publishes the stored trajectories of another run instead of sampling."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.timing import Clock
from hacrl.training.trajectories import not_attempted
from hacrl.trust.publish import public_rows
from hacrl.types import Finish, Sampling, Trajectory

if TYPE_CHECKING:
    from hacrl.training.local import Shared


class ReplayAgent:
    """Publishes, for each problem of a step, the stored trajectories of that problem: those of the
    same step if there are any, else the newest. A problem that the stored run never saw is "not
    attempted"."""

    def __init__(self, agent: AgentConfig, shared: Shared) -> None:
        self.name, self.agent, self.config = agent.name, agent, shared.config
        self.task, self.pool = shared.task, shared.pool
        self.clock = Clock()
        self.notes: list[str] = []
        assert agent.replay is not None
        run = RunDirectory.open(Path(agent.replay))
        self.stored = self._load(run, self._source(run.config()), shared.verifier.label)

    def restore(self, steps: object) -> None:
        """Nothing to restore: this agent has no weights."""

    def _source(self, stored: Config) -> str:
        names = [a.name for a in stored.agents]
        wanted = self.agent.replay_agent or (names[0] if len(names) == 1 else None)
        if wanted not in names:
            raise UserError(
                f"agent {self.name!r}: replay_agent = {self.agent.replay_agent!r}, but the run "
                f"{self.agent.replay} has {', '.join(names)}. Name one of them."
            )
        return wanted

    def _load(
        self, run: RunDirectory, source: str, verifier: str
    ) -> dict[str, dict[int, list[Trajectory]]]:
        stored: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
        unreadable: list[str] = []
        pool = Pool(run.pool_path, read_only=True)
        for t in pool.rows(agent=source, report=unreadable.append):
            if t.finish is Finish.NOT_ATTEMPTED:
                continue
            self._check(t, run, verifier)
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

    def _check(self, t: Trajectory, run: RunDirectory, verifier: str) -> None:
        """Raise a UserError if rewards or log-probabilities of the run mean something else here."""
        theirs, ours = t.sampling.temperature, self.config.temperature
        if t.verifier != verifier:
            raise UserError(
                f"agent {self.name!r}: the run {run.path} was judged by {t.verifier!r}, this run "
                f"uses {verifier!r}. Their rewards cannot be mixed."
            )
        if theirs != ours:
            raise UserError(
                f"agent {self.name!r}: the run {run.path} was sampled at temperature {theirs:g}, "
                f"this run has temperature = {ours:g}. Set the same value."
            )

    def republish(self, step: int) -> None:
        """Publish a step again, because its batch is damaged."""
        self.rollout(step)

    def rollout(self, step: int) -> dict[str, Any]:
        # A published batch stays as it is, even if the stored run has grown since.
        whole = self.pool.whole(step, self.name)
        rows = list(self.pool.rows(self.name, step)) if whole else self._choose(step)
        if not whole:
            rows = public_rows(rows, self.agent.publish, self.config.trust.judge_again)
        self.pool.publish(step, self.name, rows)
        attempted = [t for t in rows if t.judged]
        rewards = [t.reward for t in attempted]
        return {
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "rollouts": 0,
            "replayed": len(attempted),
            "not_attempted": sum(t.finish is Finish.NOT_ATTEMPTED for t in rows),
        }

    def _choose(self, step: int) -> list[Trajectory]:
        rows: list[Trajectory] = []
        problems = self.task.batch(step, self.config.problems_per_step)
        for problem in problems:
            by_step = self.stored.get(problem.id, {})
            found = by_step.get(step) or (by_step[max(by_step)] if by_step else [])
            for i, t in enumerate(found[: self.config.samples_of(self.agent)]):
                rows.append(replace(t, agent=self.name, step=step, index=i, task=problem.task))
            if not found:
                rows.append(
                    not_attempted(problem, self.name, step, Sampling(self.config.temperature, 0))
                )
        return rows
