"""All agents in one process, one call at a time."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hacrl.algorithms import Algorithm, make_algorithm
from hacrl.config import AgentConfig, Config
from hacrl.logs.observer import PHASES
from hacrl.policy.sharding.followers import LocalRanks
from hacrl.stopping import check
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import Task, make_task
from hacrl.training.agent import Agent
from hacrl.training.hooks import Hooks
from hacrl.training.loop import Executor
from hacrl.training.replay import ReplayAgent
from hacrl.verify import VerifierPool


@dataclass(frozen=True)
class Shared:
    """What the agents of one process have in common."""

    config: Config
    run: RunDirectory
    pool: Pool
    task: Task
    verifier: VerifierPool
    algorithm: Algorithm
    hooks: Hooks


def open_shared(
    config: Config,
    run: RunDirectory,
    hooks: Hooks,
    stack: ExitStack,
    task: Task | None = None,
    pool: Pool | None = None,
) -> Shared:
    """Open the verifier and, unless given, task and pool of this process; `stack` closes them."""
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    task = task or make_task(config.task, config.seed, run.path)
    verifier = stack.enter_context(VerifierPool(config.verifier))
    algorithm = make_algorithm(config.algorithm, verifier.reward_range)
    pool = pool or Pool(run.pool_path)
    return Shared(config, run, pool, task, verifier, algorithm, hooks)


class LocalExecutor(Executor):
    """Runs calls in this process."""

    def open(self, stack: ExitStack, task: Task | None = None, pool: Pool | None = None) -> None:
        config = self.config
        ranks = LocalRanks(config, stack)
        shared = open_shared(config, self.run, self.hooks, stack, task, pool)
        shared.verifier.report = self.observer.note
        self.make = lambda name: make_agent(config.agent(name), shared, ranks.policy)
        self.agents = {a.name: self.make(a.name) for a in config.agents}

    async def call(self, name: str, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)  # agents take turns: all roll out before the first one learns
        check()
        self.observer.phase(PHASES.get(method, method))
        agent = self.agents[name]
        result = getattr(agent, method)(*args)
        self.report(name, agent.clock.read(), agent.notes)
        agent.notes.clear()
        return result


def make_agent(agent: AgentConfig, shared: Shared, make_policy: Any) -> Agent | ReplayAgent:
    """The agent that the config describes; `make_policy` builds its weights."""
    if agent.replay:
        return ReplayAgent(agent, shared)
    return Agent(agent, shared, make_policy(agent))
