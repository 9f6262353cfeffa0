"""What runs inside Ray's processes: the ranks of an agent. Rank 0 holds the agent, others follow it.

These are plain classes, which ray.py makes actors of. Everything is loaded with the first call, so that
what a user can mend comes back as a sentence.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hacrl
from hacrl.config import AgentConfig, Config
from hacrl.errors import RunStopped, UserError
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory


@dataclass(frozen=True)
class Orders:
    """What an agent's processes must know.

    Example: Orders(config, "wren", "/data/runs/team", "/home/me", "0.1.0")
    """

    config: Config
    agent: str
    run: str
    folder: str
    """Where the run was started: a user's own modules are imported from there."""
    version: str


@dataclass(frozen=True)
class Failed:
    """Instead of an answer: what was raised, for the driver to raise."""

    kind: Literal["user", "stopped"]
    reason: str

    def error(self) -> Exception:
        return UserError(self.reason) if self.kind == "user" else RunStopped(self.reason)


class Place:
    """Rank 0: the actor that a member of the team is."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.stack = ExitStack()
        self.seat: Any = None
        self.store: Any = None

    def open_store(self) -> str:
        """Where the other ranks can join this one, as host:port."""
        from ray.util import get_node_ip_address

        from hacrl.policy.sharding.group import open_store

        host = get_node_ip_address()
        self.store = open_store(host)
        return f"{host}:{self.store.port}"

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            if self.seat is None:
                self.seat = self._sit()
            return self.seat.answer(method, *args)
        except UserError as error:
            return Failed("user", str(error))
        except RunStopped as error:
            return Failed("stopped", str(error))

    def close(self) -> None:
        self.stack.close()

    def _sit(self) -> Any:
        settle(self.orders)
        from hacrl.training.seat import Seat, share  # torch and transformers load here

        orders = self.orders
        run = RunDirectory(Path(orders.run))
        shared = share(orders.config, run, Pool(run.pool_path), self.stack, self._policy)
        return Seat(orders.config, orders.agent, run, shared)

    def _policy(self, agent: AgentConfig) -> Any:
        from hacrl.policy.load import choose_device
        from hacrl.policy.policy import Policy

        config = self.orders.config
        settings: dict[str, Any] = {
            "temperature": config.temperature,
            "beta": config.algorithm.beta,
            "sampler": config.sampler_of(agent),
        }
        if agent.ranks == 1:
            return Policy(agent, device=config.runtime.device, **settings)
        from hacrl.policy.sharding.group import join_group
        from hacrl.policy.sharding.sharded import ShardedPolicy

        device = choose_device(agent.device or config.runtime.device).type
        address = f"{self.store.host}:{self.store.port}"
        group = join_group(
            0, agent.ranks, address, device=device, agent=agent.name, store=self.store
        )
        policy = ShardedPolicy(agent, group=group, device=device, **settings)
        self.stack.callback(policy.close)
        return policy


class FollowerPlace:
    """Another rank of an agent: it does what rank 0 tells it."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def follow(self, rank: int, address: str) -> Failed | None:
        """Returns when rank 0 lets it go, or with what a user can mend."""
        try:
            self._follow(rank, address)
        except UserError as error:
            return Failed("user", str(error))
        return None

    def _follow(self, rank: int, address: str) -> None:
        settle(self.orders)
        from hacrl.policy.load import choose_device
        from hacrl.policy.sharding.group import join_group
        from hacrl.policy.sharding.sharded import follow

        config = self.orders.config
        agent = config.agent(self.orders.agent)
        if config.runtime.threads:
            import torch

            torch.set_num_threads(config.runtime.threads)
        device = choose_device(agent.device or config.runtime.device).type
        group = join_group(rank, agent.ranks, address, device=device, agent=agent.name)
        follow(group, device)


def settle(orders: Orders) -> None:
    """Make this process like the one that the run was started in, and see that it can be one."""
    if hacrl.__version__ != orders.version:
        raise UserError(
            f"agent {orders.agent!r}: hacrl {hacrl.__version__} is installed on its machine, but the "
            f"run was started with {orders.version}. Install the same version on all machines."
        )
    if not (Path(orders.run) / "config.toml").is_file():
        raise UserError(
            f"agent {orders.agent!r}: its machine does not see the run directory {orders.run}. "
            "Journals and checkpoints lie there, and an agent that comes back on another machine needs "
            "them: put the run (--run) on a file system that all machines share."
        )
    if os.path.isdir(orders.folder):
        os.chdir(orders.folder)
    if orders.folder not in sys.path:
        sys.path.append(orders.folder)
