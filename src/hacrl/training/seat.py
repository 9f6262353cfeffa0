"""One member of a team at its place: the member itself and all that it does beside its two phases.

Every runtime makes its members here, and asks them by the names of these methods; where the seat is
(in this process, or in an actor on another machine) is the runtime's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hacrl.algorithms import Algorithm, make_algorithm
from hacrl.config import AgentConfig, Config
from hacrl.policy.policy import Policy
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import Task, make_task
from hacrl.training.agent import Agent, Member
from hacrl.training.evaluate import evaluate
from hacrl.training.replay import ReplayMember
from hacrl.training.timing import Clock
from hacrl.verify import VerifierPool


@dataclass(frozen=True)
class Shared:
    """What the members of one process share."""

    task: Task
    verifier: VerifierPool
    algorithm: Algorithm
    pool: Pool
    policy: Callable[[AgentConfig], Policy]
    """Makes an agent's weights, where the runtime keeps them."""


@dataclass(frozen=True)
class Answer:
    """What a seat answers to one call.

    Example: Answer(value={"reward": 0.4}, seconds={"sample": 1.2}, beside={}, notes=())
    """

    value: Any
    seconds: dict[str, float]
    """Of the member's phases."""
    beside: dict[str, float]
    """Of evaluation and checkpoints."""
    notes: tuple[str, ...]
    """What a person should know."""


def share(
    config: Config,
    run: RunDirectory,
    pool: Pool,
    stack: ExitStack,
    policy: Callable[[AgentConfig], Policy],
) -> Shared:
    """Open what the members of this process need; `stack` closes it."""
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    task = make_task(config.task, config.seed, run.path)
    verifier = stack.enter_context(VerifierPool(config.verifier))
    algorithm = make_algorithm(config.algorithm, verifier.reward_range)
    return Shared(task, verifier, algorithm, pool, policy)


def make_member(config: Config, agent: AgentConfig, run: RunDirectory, shared: Shared) -> Member:
    if agent.replay:
        return ReplayMember(
            config, agent, task=shared.task, pool=shared.pool, verifier=shared.verifier.label
        )
    return Agent(
        config,
        agent,
        policy=shared.policy(agent),
        algorithm=shared.algorithm,
        task=shared.task,
        verifier=shared.verifier,
        pool=shared.pool,
        run=run,
    )


class Seat:
    """A member with its checkpoints, its evaluation and its clocks.

    Example: seat = Seat(config, "wren", run, shared); seat.answer("rollout", 0).value["reward"]
    """

    def __init__(self, config: Config, name: str, run: RunDirectory, shared: Shared) -> None:
        self.config, self.name, self.run, self.shared = config, name, run, shared
        self.member = make_member(config, config.agent(name), run, shared)
        self.checkpoints = Checkpoints(run.checkpoints(name), config.checkpoint.keep)
        self.clock = Clock()
        self._notes: list[str] = []

    def answer(self, call: str, *args: Any) -> Answer:
        """Do what `call` names; the answer says as well how long it took."""
        value = getattr(self, call)(*args)
        member = self.member.clock.read() if isinstance(self.member, Agent) else {}
        notes, self._notes = tuple(self._notes), []
        return Answer(value, member, self.clock.read(), notes)

    # ------------------------------------------------------------ what a runtime may call

    def restore(self, steps: Sequence[int]) -> int | None:
        """Take the weights of the newest of these checkpoints that is whole, or the start weights;
        the step reached by them. None for a member that has no weights to learn."""
        if not self._learner:
            return None
        found = self.checkpoints.newest_whole(self._notes.append, steps)
        if found is None:
            return 0
        self._learner.policy.restore(self.checkpoints.load(found))
        return found

    def rollout(self, step: int) -> dict[str, Any]:
        return self.member.rollout(step)

    def learn(self, step: int) -> dict[str, Any]:
        return self.member.learn(step)

    def save(self, done: int) -> None:
        assert self._learner is not None
        with self.clock("checkpoint"):
            self.checkpoints.save(self._learner.policy.checkpoint(done))

    def prune(self, also: Collection[int]) -> None:
        self.checkpoints.prune(also)

    def evaluate(self, done: int) -> tuple[dict[str, Any], bool]:
        """The agent alone on the held-out problems: its metrics, and whether it is at its best."""
        agent, settings = self.member, self.config.evaluation
        assert isinstance(agent, Agent)
        with self.clock("evaluate"):
            problems = self.shared.task.held_out(settings.problems)
            folder = self.run.evaluation(done, self.name)
            result = evaluate(agent.policy, self.config, problems, self.shared.verifier, folder)
        best = (
            done > 0
            and self._learner is not None
            and result.avg is not None
            and self.checkpoints.mark_best(done, result.avg.mean)
        )
        return result.metrics(), best

    @property
    def _learner(self) -> Agent | None:
        """The member, if it is one that learns."""
        member = self.member
        return member if isinstance(member, Agent) and member.agent.learns else None
