"""Agents over several processes of one machine: what the runtime `local` does with `ranks`.

This process is rank 0 of every agent; the other ranks are started here as processes of their own.
All of them are one world of torch.distributed, and each agent has a group in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

import hacrl
from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.policy.load import choose_device
from hacrl.policy.policy import Policy
from hacrl.policy.sharding.group import (
    LOOPBACK,
    Group,
    join_world,
    leave_world,
    loopback_only,
    make_group,
    open_store,
)
from hacrl.policy.sharding.sharded import ShardedPolicy, follow

GRACE = 10.0
"""Seconds that a follower has to end by itself."""


@dataclass(frozen=True)
class Seat:
    """What one process is told.

    Example: Seat(rank=1, world=2, address="127.0.0.1:40123", agent="wren",
             groups={"wren": [0, 1]}, device="cpu", backend_device="cpu", paths=["/home/me"])
    """

    rank: int
    """In the world."""
    world: int
    address: str
    agent: str
    """Whom it follows."""
    groups: Mapping[str, list[int]]
    """The ranks of every sharded agent."""
    device: str
    """Its own."""
    backend_device: str
    """cuda if any agent is on GPUs."""
    paths: list[str]
    """Where modules may be found besides, for algorithms of the user's own."""


class LocalRanks:
    """Makes policies, whole or sharded as the config says; a context manager, because followers
    must be let go.

    Example: with LocalRanks(config) as ranks: policy = ranks.policy(config.agents[0])
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sharded = [a for a in config.agents if a.ranks > 1 and a.replay is None]
        self.groups: dict[str, Group] = {}
        self.policies: list[ShardedPolicy] = []
        self.followers: dict[str, list[Follower]] = {}
        """The processes beside this one, by agent."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalRanks:
        if self.sharded:
            try:
                self._start()
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def policy(self, agent: AgentConfig) -> Policy:
        settings: dict[str, Any] = {
            "temperature": self.config.temperature,
            "beta": self.config.algorithm.beta,
            "sampler": self.config.sampler_of(agent),
        }
        if agent.name not in self.groups:
            return Policy(agent, device=self.config.runtime.device, **settings)
        policy = ShardedPolicy(
            agent, group=self.groups[agent.name], device=self._devices(agent)[0], **settings
        )
        self.policies.append(policy)
        return policy

    def _start(self) -> None:
        devices = {a.name: self._devices(a) for a in self.sharded}
        on_gpu = any(d.startswith("cuda") for names in devices.values() for d in names)
        kind = "cuda" if on_gpu else "cpu"
        members, world = _seats(self.sharded)
        self._stack.enter_context(loopback_only())
        store = open_store()
        address, paths = f"{LOOPBACK}:{store.port}", _search_paths()
        for agent in self.sharded:
            self.followers[agent.name] = [
                Follower(Seat(rank, world, address, agent.name, members, device, kind, paths))
                for rank, device in zip(
                    members[agent.name][1:], devices[agent.name][1:], strict=True
                )
            ]
        everyone = [f for followers in self.followers.values() for f in followers]
        join_world(
            0,
            world,
            address,
            device=kind,
            store=store,
            ending=lambda: _endings(everyone, patience=0.0),
        )
        for name, ranks in members.items():
            self.groups[name] = make_group(store, ranks, name)
            self.groups[name].ending = partial(_endings, self.followers[name])

    def _devices(self, agent: AgentConfig) -> list[str]:
        """One for each rank: GPUs in a row from the agent's own on."""
        first = choose_device(agent.device or self.config.runtime.device)
        if first.type == "cpu":
            return ["cpu"] * agent.ranks
        start, there = first.index or 0, torch.cuda.device_count()
        if start + agent.ranks > there:
            raise UserError(
                f"agent {agent.name!r}: ranks = {agent.ranks} needs the GPUs cuda:{start} to "
                f"cuda:{start + agent.ranks - 1}, but there are {there} here. Lower ranks, or set the "
                "agent's device."
            )
        return [f"cuda:{start + i}" for i in range(agent.ranks)]

    def _end(self) -> None:
        for policy in self.policies:
            with contextlib.suppress(RuntimeError):
                policy.close()
        if self.sharded:  # a world that is not ours (vLLM's) is not ours to leave
            leave_world(*self.groups.values())
        for follower in (f for group in self.followers.values() for f in group):
            follower.end()
        self.policies, self.groups, self.followers = [], {}, {}
        self._stack.close()


class Follower:
    """A process that follows."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._noise: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "hacrl.policy.sharding.followers",
                json.dumps(asdict(seat)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._noise,
            stderr=self._noise,
            start_new_session=True,  # deaf to Ctrl-C: rank 0 decides when to end
            env=_environment(),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ending(self, patience: float) -> str:
        """How it ended, in words; empty while it runs, also after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        code = self._process.poll()
        if code is None:
            return ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._noise.seek(0)
        lines = self._noise.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"process {self.pid}: {how}" + (f"; {lines[-1]}" if lines else "")

    def end(self) -> None:
        try:
            self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._noise.close()


def _seats(agents: Sequence[AgentConfig]) -> tuple[dict[str, list[int]], int]:
    """The world's ranks of each agent, this process first; how many there are in all."""
    members: dict[str, list[int]] = {}
    world = 1
    for agent in agents:
        members[agent.name] = [0, *range(world, world + agent.ranks - 1)]
        world += agent.ranks - 1
    return members, world


def _environment() -> dict[str, str]:
    """A follower must find this very package, also when it was never installed."""
    root = str(Path(hacrl.__path__[0]).parent)
    parts = [os.environ.get("PYTHONPATH", ""), root]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}


def _search_paths() -> list[str]:
    """Where a user's algorithm may lie: the folder run from and wherever this process looks."""
    return [str(Path.cwd()), *(str(Path(path).absolute()) for path in sys.path if path)]


def _endings(followers: Sequence[Follower], patience: float = 1.0) -> str:
    return "; ".join(text for follower in followers if (text := follower.ending(patience)))


def main(told: str) -> None:
    seat = Seat(**json.loads(told))
    sys.path += [path for path in seat.paths if path not in sys.path]
    store = join_world(seat.rank, seat.world, seat.address, device=seat.backend_device)
    groups = {name: make_group(store, ranks, name) for name, ranks in seat.groups.items()}
    follow(groups[seat.agent], seat.device)
    leave_world()


if __name__ == "__main__":
    main(sys.argv[1])
