"""Starts the ranks of sharded agents on this machine, for runtime.kind = "local".

This process is rank 0 of every agent. Each other rank is a process that runs `main` below. All of them
are one world of torch.distributed, in which each agent has a process group.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.policy.load import choose_device
from hacrl.policy.policy import Policy
from hacrl.policy.sharding.process_group import (
    LOOPBACK,
    RankGroup,
    join_world,
    leave_world,
    loopback_only,
    make_group,
    open_store,
)
from hacrl.policy.sharding.sharded import ShardedPolicy, follow
from hacrl.stopping import start_python

EXIT_TIMEOUT = 10.0  # seconds until a follower that does not end is killed


@dataclass(frozen=True)
class RankSpec:
    """What a follower needs to join, as JSON on its command line.

    Example: RankSpec(rank=1, size=2, address="127.0.0.1:40123", agent="wren",
             groups={"wren": [0, 1]}, device="cpu", backend_device="cpu", paths=["/home/me"])
    """

    rank: int
    size: int  # rank in the world, and its number of processes
    address: str  # host:port of the store
    agent: str
    groups: Mapping[str, list[int]]  # the ranks of every sharded agent
    device: str
    backend_device: str  # cuda if any agent is on GPUs
    paths: list[str]  # import paths for the user's own algorithms


class LocalRanks:
    """Makes the policies of a config, whole or sharded, after starting the followers of sharded agents.
    `stack` ends policies and followers.

    Example: with ExitStack() as stack: policy = LocalRanks(config, stack).policy(config.agents[0])
    """

    def __init__(self, config: Config, stack: contextlib.ExitStack) -> None:
        self.config, self.stack = config, stack
        self.groups: dict[str, RankGroup] = {}
        self.followers: dict[str, list[Follower]] = {}
        """The processes other than this one, by agent."""
        if sharded := [a for a in config.agents if a.ranks > 1 and a.replay is None]:
            self._start(sharded)

    def policy(self, agent: AgentConfig) -> Policy:
        settings: dict[str, Any] = {
            "temperature": self.config.temperature,
            "beta": self.config.algorithm.beta,
            "sampler": self.config.sampler_of(agent),
        }
        if agent.name not in self.groups:
            return Policy(agent, device=self.config.runtime.device, **settings)
        device = self._devices(agent)[0]
        policy = ShardedPolicy(agent, group=self.groups[agent.name], device=device, **settings)
        self.stack.callback(policy.close)
        return policy

    def _start(self, agents: Sequence[AgentConfig]) -> None:
        devices = {a.name: self._devices(a) for a in agents}
        on_gpu = any(d.startswith("cuda") for names in devices.values() for d in names)
        backend_device = "cuda" if on_gpu else "cpu"
        ranks, size = _assign_ranks(agents)
        self.stack.enter_context(loopback_only())
        store = open_store()
        address, paths = f"{LOOPBACK}:{store.port}", _import_paths()
        started: list[Follower] = []
        for name, (_, *others) in ranks.items():
            self.followers[name] = []
            for rank, device in zip(others, devices[name][1:], strict=True):
                spec = RankSpec(rank, size, address, name, ranks, device, backend_device, paths)
                started.append(Follower(spec))
                self.stack.push(started[-1].end)
                self.followers[name].append(started[-1])
        exits = partial(_exits, started, timeout=0.0)
        join_world(0, size, address, device=backend_device, store=store, exits=exits)
        self.stack.callback(lambda: leave_world(*self.groups.values()))
        for name, members in ranks.items():
            self.groups[name] = make_group(store, members, name)
            self.groups[name].exits = partial(_exits, self.followers[name])

    def _devices(self, agent: AgentConfig) -> list[str]:
        """The device of each rank: consecutive GPUs, beginning with the agent's."""
        first = choose_device(agent.device or self.config.runtime.device)
        if first.type == "cpu":
            return ["cpu"] * agent.ranks
        start, count = first.index or 0, torch.cuda.device_count()
        if start + agent.ranks > count:
            raise UserError(
                f"agent {agent.name!r}: ranks = {agent.ranks} needs the GPUs cuda:{start} to "
                f"cuda:{start + agent.ranks - 1}, but this machine has {count}. Lower ranks, or set the "
                "agent's device."
            )
        return [f"cuda:{start + i}" for i in range(agent.ranks)]


class Follower:
    """The process of a rank other than 0."""

    def __init__(self, spec: RankSpec) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = start_python(
            "hacrl.policy.sharding",
            json.dumps(asdict(spec)),
            stdout=self._output,
            stderr=self._output,
        )
        self.pid = self._process.pid

    def exit_text(self, timeout: float) -> str:
        """How the process ended; empty if it still runs after `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout)
        code = self._process.poll()
        if code is None:
            return ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._output.seek(0)
        lines = self._output.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"process {self.pid}: {how}" + (f"; {lines[-1]}" if lines else "")

    def end(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Wait for the process, and kill it if it does not end. After an error it is killed at once:
        it may be sampling, or waiting for rank 0."""
        try:
            self._process.wait(timeout=0.0 if error else EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def _exits(followers: Sequence[Follower], timeout: float = 1.0) -> str:
    return "; ".join(text for follower in followers if (text := follower.exit_text(timeout)))


def _assign_ranks(agents: Sequence[AgentConfig]) -> tuple[dict[str, list[int]], int]:
    """The ranks of each agent in the world, with this process as the first, and the world's size."""
    ranks: dict[str, list[int]] = {}
    size = 1
    for agent in agents:
        ranks[agent.name] = [0, *range(size, size + agent.ranks - 1)]
        size += agent.ranks - 1
    return ranks, size


def _import_paths() -> list[str]:
    return [str(Path.cwd()), *(str(Path(path).absolute()) for path in sys.path if path)]


def main(argument: str) -> None:
    """Run a follower until rank 0 ends it."""
    spec = RankSpec(**json.loads(argument))
    sys.path += [path for path in spec.paths if path not in sys.path]
    store = join_world(spec.rank, spec.size, spec.address, device=spec.backend_device)
    groups = {name: make_group(store, ranks, name) for name, ranks in spec.groups.items()}
    follow(groups[spec.agent], spec.device)
    leave_world()
