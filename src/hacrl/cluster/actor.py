"""What runs in the processes of an agent: its ranks. Rank 0 holds the agent.

These are plain classes. ray.py makes Ray actors of them; processes.py runs `AgentActor` in a
process of this machine. Torch and the model load with the first call, so that errors reach the user as
a sentence.
"""

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import hacrl
from hacrl.config import AgentConfig, Config
from hacrl.errors import RunStopped, UserError
from hacrl.store.rundir import RunDirectory
from hacrl.training.hooks import Hooks


@dataclass(frozen=True)
class AgentSpec:
    """What the processes of an agent need to know.

    Example: AgentSpec(config, "wren", "/data/runs/team", Hooks())
    """

    config: Config
    agent: str
    run: str
    hooks: Hooks
    folder: str = field(default_factory=os.getcwd)  # user modules are imported from there
    version: str = field(default_factory=lambda: hacrl.__version__)


@dataclass(frozen=True)
class Answer:
    """Result of a call.

    Example: Answer(value={"reward": 0.4}, seconds={"sample": 1.2}, notes=[])
    """

    value: Any
    seconds: dict[str, float]
    notes: list[str]


@dataclass(frozen=True)
class Failed:
    """Returned instead of an answer: an error that the driver raises."""

    kind: Literal["user", "stopped"]
    reason: str

    def error(self) -> Exception:
        return UserError(self.reason) if self.kind == "user" else RunStopped(self.reason)


class AgentActor:
    """Rank 0 of an agent."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.stack = ExitStack()
        self.agent: Any = None
        self.store: Any = None

    def open_store(self) -> str:
        """Open the rendezvous store of the other ranks and return its host:port."""
        from ray.util import get_node_ip_address

        from hacrl.policy.sharding.process_group import open_store

        host = get_node_ip_address()
        self.store = open_store(host)
        return f"{host}:{self.store.port}"

    def call(self, method: str, args: tuple[Any, ...]) -> Answer | Failed:
        try:
            if self.agent is None:
                self.agent = self._load()
            value = getattr(self.agent, method)(*args)
            notes = self.agent.notes.copy()
            self.agent.notes.clear()
            return Answer(value, self.agent.clock.read(), notes)
        except UserError as error:
            return Failed("user", str(error))
        except RunStopped as error:
            return Failed("stopped", str(error))

    def close(self) -> None:
        self.stack.close()

    def _load(self) -> Any:
        prepare_process(self.spec)
        from hacrl.training.local import make_agent, open_shared

        spec = self.spec
        shared = open_shared(spec.config, RunDirectory(Path(spec.run)), spec.hooks, self.stack)
        agent = make_agent(spec.config.agent(spec.agent), shared, self._policy)
        shared.verifier.report = agent.notes.append
        return agent

    def _policy(self, agent: AgentConfig) -> Any:
        """The agent's weights. Without a store, its other ranks are processes started by this one."""
        from hacrl.policy.load import choose_device
        from hacrl.policy.sharding.followers import LocalRanks
        from hacrl.policy.sharding.process_group import join_group
        from hacrl.policy.sharding.sharded import ShardedPolicy

        config = self.spec.config
        if self.store is None:
            alone = config.model_copy(update={"agents": (agent,)})
            return LocalRanks(alone, self.stack).policy(agent)
        device = choose_device(agent.device or config.runtime.device).type
        address = f"{self.store.host}:{self.store.port}"
        group = join_group(
            0, agent.ranks, address, device=device, agent=agent.name, store=self.store
        )
        policy = ShardedPolicy(
            agent,
            group=group,
            device=device,
            temperature=config.temperature,
            beta=config.algorithm.beta,
            sampler=config.sampler_of(agent),
        )
        self.stack.callback(policy.close)
        return policy


class FollowerActor:
    """Another rank of an agent. It executes the commands of rank 0."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec

    def follow(self, rank: int, address: str) -> Failed | None:
        """Run until rank 0 ends this rank; a user's error is returned."""
        try:
            self._follow(rank, address)
        except UserError as error:
            return Failed("user", str(error))
        return None

    def _follow(self, rank: int, address: str) -> None:
        prepare_process(self.spec)
        from hacrl.policy.load import choose_device
        from hacrl.policy.sharding.process_group import join_group
        from hacrl.policy.sharding.sharded import follow

        config = self.spec.config
        agent = config.agent(self.spec.agent)
        if config.runtime.threads:
            import torch

            torch.set_num_threads(config.runtime.threads)
        device = choose_device(agent.device or config.runtime.device).type
        group = join_group(rank, agent.ranks, address, device=device, agent=agent.name)
        follow(group, device)


def prepare_process(spec: AgentSpec) -> None:
    """Check version and run directory, and use the working directory of the driver."""
    if hacrl.__version__ != spec.version:
        raise UserError(
            f"agent {spec.agent!r}: hacrl {hacrl.__version__} is installed on its machine, but the "
            f"run was started with {spec.version}. Install the same version on all machines."
        )
    if not (Path(spec.run) / "config.toml").is_file():
        raise UserError(
            f"agent {spec.agent!r}: its machine does not see the run directory {spec.run}. "
            "Put the run (--run) on a file system that all machines share: journals, batches and "
            "checkpoints are read from there."
        )
    if os.path.isdir(spec.folder):
        os.chdir(spec.folder)
    if spec.folder not in sys.path:
        sys.path.append(spec.folder)
