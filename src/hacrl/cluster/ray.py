"""Agents as Ray actors, in parallel, on one machine or on many (docs/scale.md).

Ray places and starts one process per rank of an agent, with the cores, GPUs and other resources
that the agent's table asks for. The loop is that of loop.py; a call to an agent is a remote call
to its rank 0. If a process or machine is gone, the call raises AgentLost, and the next call starts
the agent's processes again wherever there is room.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from hacrl.cluster.actor import AgentActor, AgentSpec, Failed, FollowerActor
from hacrl.config import AgentConfig, Config
from hacrl.errors import Terminated, UserError, first_line
from hacrl.logs.observer import PHASES
from hacrl.stopping import check
from hacrl.store.pool import Pool
from hacrl.tasks import Task
from hacrl.training.loop import AgentLost, Executor

POLL = 0.5  # seconds between two checks for Ctrl-C and SIGTERM
PATIENCE = 60.0  # seconds after which an agent without a machine is reported
GRACE = 10.0  # seconds that a process has to end by itself
NOTICE = 30.0
"""Seconds until Ray reports a dead machine: by default five missed health checks, 3 s apart."""


def connect(config: Config, stack: ExitStack) -> bool:
    """Join a cluster, or start one on this machine for this run. Returns whether it was joined."""
    try:
        import ray
    except ImportError as error:
        raise UserError("runtime.kind = 'ray' needs Ray: pip install 'hacrl[ray]'") from error
    if ray.is_initialized():
        return True
    address = config.runtime.address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise UserError(
            f"runtime.address = {address!r}: start the run on a machine of the cluster with the "
            "head's HOST:PORT, or auto. A run cannot be driven through Ray's client."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        # More agents than cores is allowed on one machine: they share its cores.
        cores = sum(a.cpus * a.ranks for a in config.agents)
        options |= {
            "num_cpus": max(os.cpu_count() or 1, int(cores + 1)),
            "include_dashboard": False,
        }
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"runtime.address = {address!r}: cannot connect to a Ray cluster there "
            f"({first_line(error)}). Check that it is running and that RAY_AUTH_TOKEN_PATH is set."
        ) from error
    except SystemExit as error:
        raise (Terminated() if error.code == signal.SIGTERM else error) from error
    stack.callback(ray.shutdown)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's handler exits with code 15
    return address != "local"


@dataclass
class _Processes:
    """The processes of one agent."""

    leader: Any
    followers: list[Any] = field(default_factory=list)
    following: list[Any] = field(default_factory=list)
    """References of the followers' calls. One that ends early means that the rank is gone."""
    started: float = field(default_factory=time.monotonic)
    alive: bool = False  # whether the leader has answered
    reported: bool = False


class RayExecutor(Executor):
    """Runs calls in Ray actors."""

    def open(self, stack: ExitStack, task: Task, pool: Pool) -> None:
        config = self.config
        joined = connect(config, stack)
        self.gpus = _cluster("GPU") > 0 and config.runtime.device != "cpu"
        self.bundles = {(a.name, r): self._needs(a) for a in config.agents for r in range(a.ranks)}
        self.placement = self._reserve(joined, stack)
        self.processes: dict[str, _Processes] = {}
        self.calling: set[str] = set()  # agents whose call has not returned
        stack.callback(self._end)

    async def call(self, name: str, method: str, *args: Any) -> Any:
        self.observer.phase(PHASES.get(method, method))
        processes = self.processes.get(name) or self._start(name)
        self.calling.add(name)
        answer = await self._answer(name, processes, processes.leader.call.remote(method, args))
        self.calling.discard(name)
        processes.alive = True
        self.report(name, answer.seconds, answer.notes)
        return answer.value

    async def _answer(self, name: str, processes: _Processes, reference: Any) -> Any:
        """Wait for the leader's answer or for the end of one of its ranks."""
        import ray

        answer, *following = (
            asyncio.wrap_future(r.future()) for r in (reference, *processes.following)
        )
        done: set[Any] = set()
        while not done:
            done, _ = await asyncio.wait(
                (answer, *following), timeout=POLL, return_when=asyncio.FIRST_COMPLETED
            )
            check()
            self._report_waiting(name, processes)
        first = answer if answer in done else done.pop()
        try:
            result = first.result()
        except ray.exceptions.RayTaskError as error:
            if first is answer:
                raise (error.cause or error) from error
            raise AgentLost(self._drop(name, error)) from error
        except ray.exceptions.RayError as error:
            raise AgentLost(self._drop(name, error)) from error
        failed = result if isinstance(result, Failed) else None
        if failed and failed.kind == "user":  # a restart would fail in the same way
            raise failed.error()
        if first is not answer:
            raise AgentLost(self._drop(name, "one of its ranks has ended"))
        if failed:
            if following and await _one_ends(following, NOTICE):  # the cause is a dead rank
                raise AgentLost(self._drop(name, failed.reason))
            raise failed.error()
        return result

    # ------------------------------------------------------------ processes

    def _start(self, name: str) -> _Processes:
        """Start the agent's actors in its placement bundles. They wait there for machines."""
        agent = self.config.agent(name)
        spec = AgentSpec(self.config, name, str(self.run.path.absolute()), self.hooks)
        leader = self._actor(AgentActor, name, 0).remote(spec)
        processes = self.processes[name] = _Processes(leader)
        if agent.ranks > 1:
            # The other ranks connect to the machine of rank 0.
            address = leader.open_store.remote()
            for rank in range(1, agent.ranks):
                follower = self._actor(FollowerActor, name, rank).remote(spec)
                processes.followers.append(follower)
                processes.following.append(follower.follow.remote(rank, address))
        return processes

    def _actor(self, kind: type, name: str, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = dict(self.bundles[name, rank])
        return ray.remote(kind).options(
            num_cpus=needs.pop("CPU"),
            num_gpus=needs.pop("GPU", 0),
            resources=needs,
            max_restarts=0,  # the team decides when an agent restarts
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.placement, placement_group_bundle_index=list(self.bundles).index((name, rank))
            ),
        )

    def _drop(self, name: str, why: Exception | str) -> str:
        """Kill what is left of an agent's processes and return the reason as text."""
        import ray

        processes = self.processes.pop(name)
        self.calling.discard(name)
        for actor in (processes.leader, *processes.followers):
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        return why if isinstance(why, str) else first_line(why)

    def _report_waiting(self, name: str, processes: _Processes) -> None:
        waited = time.monotonic() - processes.started
        if not processes.alive and not processes.reported and waited >= PATIENCE:
            processes.reported = True
            self.observer.note(
                f"agent {name!r} has waited {PATIENCE:.0f} seconds for a machine or for its model to "
                f"load. Each of its ranks asks for {_words(self.bundles[name, 0])}."
            )

    def _end(self) -> None:
        """Let idle actors close their files, then kill all actors."""
        import ray

        idle = [p for n, p in self.processes.items() if n not in self.calling]
        closing = [p.leader.close.remote() for p in idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=GRACE)
        for name in list(self.processes):
            self._drop(name, "")

    # ------------------------------------------------------------ resources

    def _needs(self, agent: AgentConfig) -> dict[str, float]:
        """Resources of one rank of the agent."""
        if agent.device and ":" in agent.device:
            raise UserError(
                f"agent {agent.name!r}: device = {agent.device!r}, but Ray assigns the GPUs. Remove "
                "device and set gpus instead."
            )
        gpus = agent.gpus if agent.gpus is not None else float(self.gpus and not agent.replay)
        if agent.device == "cpu" and agent.gpus is None:
            gpus = 0.0
        return {"CPU": agent.cpus, **({"GPU": gpus} if gpus else {}), **agent.resources}

    def _reserve(self, joined: bool, stack: ExitStack) -> Any:
        """Reserve resources for all ranks (a placement group, packed or spread)."""
        from ray.util.placement_group import placement_group, remove_placement_group

        needs = list(self.bundles.values())
        until = time.monotonic() + (PATIENCE if joined else 0)
        while lacking := _lacking(needs):
            if time.monotonic() >= until:  # machines of a cluster may still be starting
                raise UserError(
                    f"the agents ask for {lacking}. Lower cpus, gpus, resources or ranks of "
                    "the agents, or add machines."
                )
            time.sleep(1.0)
        group = placement_group(needs, strategy=self.config.runtime.placement.upper())
        stack.callback(remove_placement_group, group)
        reported = False
        while not group.wait(PATIENCE):
            if not reported:
                self.observer.note("the cluster is busy: waiting for free resources.")
            reported = True
        return group


async def _one_ends(following: list[Any], seconds: float) -> bool:
    """Whether one of the followers' calls ends within this time."""
    done, _ = await asyncio.wait(following, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


def _cluster(resource: str) -> float:
    import ray

    return float(ray.cluster_resources().get(resource, 0))


def _lacking(needs: list[dict[str, float]]) -> str:
    """The resource that the cluster lacks, as text; empty if it has enough."""
    for resource in sorted({key for bundle in needs for key in bundle}):
        asked, there = sum(bundle.get(resource, 0) for bundle in needs), _cluster(resource)
        if asked > there:
            return f"{asked:g} {resource} in all, but the cluster has {there:g}"
    return ""


def _words(bundle: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
