"""Every agent in processes of its own, side by side, on one machine or on many (docs/scale.md).

Ray places and starts the processes: one for each rank of an agent, with the cores, GPUs and other
resources that its table asks for. Only the pool's cut makes agents wait for one another. When a
process or machine is gone, the agent's group is started anew wherever there is room, and begins its
life again from its newest checkpoint, its journal and the cuts.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hacrl
from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError, first_line
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.observer import Observer
from hacrl.training.ray_actor import Failed, FollowerPlace, Orders, Place

if TYPE_CHECKING:
    from hacrl.training.seat import Answer
    from hacrl.training.team import Call, Lost

PATIENCE = 60.0
"""Seconds after which it is told that a member has not found a machine yet."""
GRACE = 10.0
"""Seconds that a process has to end by itself."""
NOTICE = 30.0
"""Seconds in which Ray tells that a machine is gone: by default five missed checks, three apart."""


def run_ray(config: Config, run: RunDirectory, observer: Observer) -> None:
    """Train until `config.steps`, from the newest checkpoint that all learners have."""
    from hacrl.training.team import Team

    observer.phase("loading")
    with ExitStack() as stack:
        joined = connect(config, stack)
        crew = RayCrew(config, run, observer, joined, stack)
        Team(config, run, observer).train(crew, stack)
    observer.finished()


def connect(config: Config, stack: ExitStack) -> bool:
    """Join the cluster, or start one on this machine for the time of the run; True if joined."""
    try:
        import ray
    except ImportError as error:
        raise UserError("runtime.kind = 'ray' needs Ray: pip install 'hacrl[ray]'") from error
    if ray.is_initialized():
        return True
    address = config.runtime.address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise UserError(
            f"runtime.address = {address!r}: start the run on a machine of the cluster and give the "
            "head's HOST:PORT, or auto; a run cannot be driven from outside by Ray's client."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        # Agents on one's own machine may be more than its cores: they take turns then.
        cores = sum(a.cpus * a.ranks for a in config.agents)
        options |= {
            "num_cpus": max(os.cpu_count() or 1, int(cores + 1)),
            "include_dashboard": False,
        }
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"runtime.address = {address!r}: no Ray cluster answers there, or it refuses this process "
            f"({first_line(error)}). Is it running, and has this process its token "
            "(RAY_AUTH_TOKEN_PATH)?"
        ) from error
    stack.callback(ray.shutdown)
    return address != "local"


@dataclass
class _Group:
    """The processes of one agent."""

    leader: Any
    followers: list[Any] = field(default_factory=list)
    following: list[Any] = field(default_factory=list)
    """References of the followers' calls: they end when something is wrong."""
    started: float = field(default_factory=time.monotonic)
    alive: bool = False
    """Whether it has answered."""
    told: bool = False


class RayCrew:
    """Carries calls out in actors. See `hacrl.training.team.Crew`."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        observer: Observer,
        joined: bool,
        stack: ExitStack,
    ) -> None:
        self.config, self.run, self.observer = config, run, observer
        self.gpus = _cluster("GPU") > 0 and config.runtime.device != "cpu"
        self.pool = Pool(run.pool_path)
        self.bundles = {(a.name, r): self._needs(a) for a in config.agents for r in range(a.ranks)}
        self.room = self._reserve(joined, stack)
        self.groups: dict[str, _Group] = {}
        self.calls: dict[Any, str] = {}
        """Reference of a call on its way -> whose it is."""
        stack.callback(self._end)

    def begin(self, name: str, call: Call) -> None:
        group = self.groups.get(name) or self._start(name)
        self.calls[group.leader.call.remote(call.method, call.args)] = name

    def next(self, seconds: float | None) -> tuple[str, Answer | Lost] | None:
        import ray

        from hacrl.training.team import Lost

        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = PATIENCE if until is None else min(PATIENCE, max(0.0, until - time.monotonic()))
            following = {r: name for name, g in self.groups.items() for r in g.following}
            ready, _ = ray.wait([*self.calls, *following], num_returns=1, timeout=left)
            if ready:
                break
            self._tell_who_has_no_machine()
            if until is not None and time.monotonic() >= until:
                return None
        (reference,) = ready
        name = self.calls.get(reference) or following[reference]
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if reference in following:  # the leader's group cannot go on without this rank
                return name, Lost(self._drop(name, error))
            raise (error.cause or error) from error
        except ray.exceptions.RayError as error:
            return name, Lost(self._drop(name, error))
        failed = answer if isinstance(answer, Failed) else None
        if failed and failed.kind == "user":  # beginning again would not mend it
            raise failed.error()
        if reference in following:
            return name, Lost(self._drop(name, "a rank of its group has ended"))
        if failed and self._rank_is_gone(name):
            return name, Lost(self._drop(name, failed.reason))
        del self.calls[reference]
        if failed:
            raise failed.error()
        self.groups[name].alive = True
        return name, answer

    # ------------------------------------------------------------ processes

    def _start(self, name: str) -> _Group:
        """The agent's actors, where its bundles are; they wait there for machines if need be."""
        agent = self.config.agent(name)
        orders = Orders(
            config=self.config,
            agent=name,
            run=str(self.run.path.absolute()),
            folder=str(Path.cwd()),
            version=hacrl.__version__,
        )
        leader = self._actor(Place, name, 0).remote(orders)
        group = self.groups[name] = _Group(leader)
        if agent.ranks > 1:
            # Rank 0's own machine is where the others meet it.
            address = leader.open_store.remote()
            for rank in range(1, agent.ranks):
                follower = self._actor(FollowerPlace, name, rank).remote(orders)
                group.followers.append(follower)
                group.following.append(follower.follow.remote(rank, address))
        return group

    def _actor(self, kind: type, name: str, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = dict(self.bundles[name, rank])
        return ray.remote(kind).options(
            num_cpus=needs.pop("CPU"),
            num_gpus=needs.pop("GPU", 0),
            resources=needs,
            max_restarts=0,  # a new life begins with a new process, and the team decides when
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.room, placement_group_bundle_index=list(self.bundles).index((name, rank))
            ),
        )

    def _drop(self, name: str, why: Exception | str) -> str:
        """Forget an agent's processes, and end those that are still there. Why they are gone."""
        import ray

        group = self.groups.pop(name)
        self.calls = {r: n for r, n in self.calls.items() if n != name}
        for actor in (group.leader, *group.followers):
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        return why if isinstance(why, str) else first_line(why)

    def _rank_is_gone(self, name: str) -> bool:
        """Whether the leader failed because another rank did, which may be known a little later."""
        import ray

        following = self.groups[name].following
        return bool(following and ray.wait(following, num_returns=1, timeout=NOTICE)[0])

    def _tell_who_has_no_machine(self) -> None:
        for name, group in self.groups.items():
            if group.alive or group.told or time.monotonic() - group.started < PATIENCE:
                continue
            group.told = True
            self.observer.note(
                f"agent {name!r} has been waiting for {PATIENCE:.0f} seconds to be placed or loaded; "
                f"it asks for {_words(self.bundles[name, 0])} a rank."
            )

    def _end(self) -> None:
        """Let processes close what they have open, then end them."""
        import ray

        closing = [] if self.calls else [g.leader.close.remote() for g in self.groups.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=GRACE)
        for name in list(self.groups):
            self._drop(name, "")

    # ------------------------------------------------------------ resources

    def _needs(self, agent: AgentConfig) -> dict[str, float]:
        """What one rank of the agent takes."""
        if agent.device and ":" in agent.device:
            raise UserError(
                f"agent {agent.name!r}: device = {agent.device!r}, but Ray hands the GPUs out. Leave "
                "device out and say how many with gpus."
            )
        gpus = agent.gpus if agent.gpus is not None else float(self.gpus and not agent.replay)
        if agent.device == "cpu" and agent.gpus is None:
            gpus = 0.0
        return {"CPU": agent.cpus, **({"GPU": gpus} if gpus else {}), **agent.resources}

    def _reserve(self, joined: bool, stack: ExitStack) -> Any:
        """Room for all ranks, near one another or far apart, as `runtime.placement` says."""
        from ray.util.placement_group import placement_group, remove_placement_group

        needs = list(self.bundles.values())
        until = time.monotonic() + (PATIENCE if joined else 0)
        while lacking := _lacking(needs):
            if time.monotonic() >= until:  # machines of a cluster may still be on their way
                raise UserError(
                    f"the agents ask for {lacking}. Lower what their tables ask for (cpus, gpus, "
                    "resources, ranks), or add machines."
                )
            time.sleep(1.0)
        room = placement_group(needs, strategy=self.config.runtime.placement.upper())
        stack.callback(remove_placement_group, room)
        told = False
        while not room.wait(PATIENCE):
            if not told:
                self.observer.note("the cluster's machines are busy: waiting for room.")
            told = True
        return room


def _cluster(resource: str) -> float:
    import ray

    return float(ray.cluster_resources().get(resource, 0))


def _lacking(needs: list[dict[str, float]]) -> str:
    """What the cluster has too little of, in words; empty where it has enough."""
    for resource in sorted({key for bundle in needs for key in bundle}):
        asked, there = sum(bundle.get(resource, 0) for bundle in needs), _cluster(resource)
        if asked > there:
            return f"{asked:g} {resource} in all, but the cluster has {there:g}"
    return ""


def _words(bundle: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
