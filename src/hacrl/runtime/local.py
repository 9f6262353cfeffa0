"""All agents in one process, phases in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from hacrl.agent import Agent, Member
from hacrl.algorithms import make_algorithm
from hacrl.checkpoint import Checkpoints, newest_common
from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.evaluate import evaluate, write_evaluation
from hacrl.policy.policy import Policy
from hacrl.pool import open_pool
from hacrl.replay import ReplayMember
from hacrl.report.loggers import open_loggers
from hacrl.report.observer import Observer
from hacrl.rundir import RunDirectory
from hacrl.tasks import make_task
from hacrl.timing import Clock
from hacrl.verify import VerifierPool

Rows = list[dict[str, Any]]


def run_local(config: Config, run: RunDirectory, observer: Observer) -> None:
    """Train until `config.steps`, from the newest checkpoint that all learners have."""
    with ExitStack() as stack:
        LocalTeam(config, run, observer, stack).train()
    observer.finished()


class LocalTeam:
    """The members of a run and what they share."""

    def __init__(
        self, config: Config, run: RunDirectory, observer: Observer, stack: ExitStack
    ) -> None:
        if config.runtime.threads:
            torch.set_num_threads(config.runtime.threads)
        self.config, self.run, self.observer = config, run, observer
        observer.phase("loading")
        self.task = make_task(config.task, config.seed, run.path)
        self.verifier = stack.enter_context(VerifierPool(config.verifier))
        algorithm = make_algorithm(config.algorithm, self.verifier.reward_range)
        self.pool = open_pool(config.pool.url, run.path)
        stack.callback(self.pool.dispose)
        self.members: list[Member] = []
        for agent in config.agents:
            if agent.replay:
                self.members.append(
                    ReplayMember(
                        config, agent, task=self.task, pool=self.pool, verifier=self.verifier.label
                    )
                )
                continue
            policy = Policy(
                agent,
                device=config.runtime.device,
                temperature=config.temperature,
                beta=config.algorithm.beta,
            )
            self.members.append(
                Agent(
                    config,
                    agent,
                    policy=policy,
                    algorithm=algorithm,
                    task=self.task,
                    verifier=self.verifier,
                    pool=self.pool,
                    run=run,
                )
            )
        self.agents = [m for m in self.members if isinstance(m, Agent)]
        self.learners = [a for a in self.agents if a.agent.learns]
        self.checkpoints = {
            a.name: Checkpoints(run.checkpoints(a.name), config.checkpoint.keep)
            for a in self.learners
        }
        self.clock = Clock()
        self._idle: set[str] = set()
        """Learners of which it was told that a step brought them no update."""
        self.first = self._restore()
        self.loggers = open_loggers(run, config)
        for logger in self.loggers:
            stack.callback(logger.close)

    # ------------------------------------------------------------ the run

    def train(self) -> None:
        self.observer.started(self.config, self.run, self.first)
        if self.first == 0:
            self._evaluate(0)
        for step in range(self.first, self.config.steps):
            names = [m.name for m in self.members]
            self.observer.phase("rollouts")
            rows = {m.name: m.rollout(step) for m in self.members}
            self._close(step, names)
            self.observer.phase("learning")
            for member in self.members:
                rows[member.name] |= member.learn(step)
            self._log(step, rows)
            done = step + 1
            improved = self._due(done, self.config.evaluation.every) and self._evaluate(done)
            if improved or self._due(done, self.config.checkpoint.every):
                self._checkpoint(done)
            self._log_times(step)

    def _close(self, step: int, names: list[str]) -> None:
        """Commit the step's cut; whoever closed it before must have meant the same members."""
        self.pool.close(step, names)
        members = self.pool.gather(step).members
        if set(members) != set(names):
            raise UserError(
                f"pool {self.config.pool.url}: step {step} was closed by a run whose members are "
                f"{', '.join(members)}, not {', '.join(names)}. Give each run its own pool.url."
            )

    def _due(self, done: int, every: int) -> bool:
        return done == self.config.steps or (every > 0 and done % every == 0)

    def _restore(self) -> int:
        """Load the newest whole checkpoint of all learners; 0 where there is none."""
        step = newest_common(self.checkpoints, self.observer.note) or 0
        if step:
            for agent in self.learners:
                agent.policy.restore(self.checkpoints[agent.name].load(step))
        self.run.rewind(step)
        return step

    def _checkpoint(self, done: int) -> None:
        """All learners first, then prune: at every moment some step is whole for everybody."""
        if not self.config.checkpoint.save:
            return
        self.observer.phase("checkpoint")
        with self.clock("checkpoint"):
            for agent in self.learners:
                self.checkpoints[agent.name].save(agent.policy.snapshot(done))
            for agent in self.learners:
                self.checkpoints[agent.name].prune()

    def _evaluate(self, done: int) -> bool:
        """Every agent alone on the held-out problems; True if a learner is now at its best."""
        settings = self.config.evaluation
        if not settings.problems:
            return False
        self.observer.phase("evaluating")
        problems = self.task.held_out(settings.problems)
        rows: Rows = []
        improved = False
        for agent in self.agents:
            if not agent.agent.learns and done:
                continue  # frozen: the first result stands
            with self.clock("evaluate"):
                result, rollouts = evaluate(
                    agent.policy,
                    problems,
                    self.verifier,
                    agent=agent.name,
                    step=done,
                    seed=self.config.seed,
                    samples=settings.samples,
                    temperature=settings.temperature,
                    prompt_limit=self.config.prompt_limit(agent.agent),
                    limit=settings.max_response_tokens or self.config.response_limit(agent.agent),
                )
            write_evaluation(self.run.evaluation(done, agent.name), result, rollouts, problems)
            rows.append(
                {"kind": "evaluation", "step": done, "agent": agent.name, **result.metrics()}
            )
            if done and agent.agent.learns and result.score is not None:
                improved |= self.checkpoints[agent.name].mark_best(done, result.score.mean)
        self._write(rows)
        self.observer.evaluated(done, rows)
        return improved

    # ------------------------------------------------------------ what is written

    def _log(self, step: int, by_member: Mapping[str, Mapping[str, Any]]) -> None:
        rows: Rows = [
            {"kind": "train", "step": step, "agent": name, **row} for name, row in by_member.items()
        ]
        self._write(rows)
        self.observer.stepped(step, rows)
        for row in rows:
            self._tell_if_idle(row)

    def _tell_if_idle(self, row: Mapping[str, Any]) -> None:
        """Once for each learner: a step in which it could learn nothing."""
        if row.get("updates") == 0 and row["agent"] not in self._idle:
            self._idle.add(row["agent"])
            unjudged = row["verdict/timeout"] + row["verdict/error"]
            self.observer.note(
                f"step {row['step']}: agent {row['agent']!r} made no update: {row['rollouts']} "
                f"rollouts, {unjudged} of them not judged, {row['not_attempted']} problems not "
                f"attempted, {row['updates_skipped']} updates skipped as not finite."
            )

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.run.add_metrics(rows)
        for logger in self.loggers:
            for row in rows:
                logger.log(row)

    def _log_times(self, step: int) -> None:
        for name, seconds in self._times():
            self.run.add_times({"step": step, "agent": name, **seconds})

    def _times(self) -> Iterator[tuple[str, dict[str, float]]]:
        for agent in self.agents:
            yield agent.name, agent.clock.read()
        yield "", self.clock.read()
