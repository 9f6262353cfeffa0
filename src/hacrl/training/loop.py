"""The team's loop. START HERE.

For every step: all agents roll out, the step is closed, all agents learn, evaluate and save.
`Team.run_agent` is that loop for one agent, as a coroutine; the team runs one per agent. Agents wait
for one another in one place, the barrier of a step (`Team.barrier`). An executor runs the calls to
agents: one after the other in this process (local.py), or in parallel, in processes of this machine
(cluster/processes.py) or in Ray actors (cluster/ray.py).
"""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hacrl.config import Config
from hacrl.errors import RunStopped, UserError
from hacrl.logs.metrics_log import MetricsLog
from hacrl.logs.observer import Observer
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.files import changed
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import Task
from hacrl.training.hooks import Hooks
from hacrl.training.repair import damaged_batches, first_step

MAX_LOSSES = 5  # the 5th loss without a finished step stops the run or removes the agent

START = -1  # the barrier before the first step: every agent is loaded

ABSENT = {"reward": None, "rollouts": 0, "not_attempted": 0, "absent": True}
"""Rollout metrics of an agent that is not in the step's snapshot."""


class AgentLost(Exception):
    """The agent's process or machine is gone. The team restarts it from its newest checkpoint."""


@dataclass
class Executor(ABC):
    """Runs calls to agents. Its subclasses differ in where the agents are."""

    config: Config
    run: RunDirectory
    observer: Observer
    hooks: Hooks
    seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Seconds by phase that each agent has spent since they were last read."""

    @abstractmethod
    def open(self, stack: ExitStack, task: Task, pool: Pool) -> None:
        """Prepare the agents; `stack` closes what this opens. Agents in other processes open their
        own task and pool."""

    @abstractmethod
    async def call(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of the agent and return its result; AgentLost if its process is gone."""

    async def load(self) -> None:
        """Load every agent, so that an error in its settings changes no file of the run. An agent that
        is lost here is loaded again by its first call."""

        async def load(name: str) -> None:
            try:
                await self.call(name, "restore", ())
            except AgentLost as lost:
                what = f"agent {name!r} was lost while it was loaded ({lost}). It is loaded again."
                self.observer.note(what)

        await asyncio.gather(*(load(agent.name) for agent in self.config.agents))

    def report(self, name: str, seconds: Mapping[str, float], notes: Iterable[str]) -> None:
        """Add up an agent's seconds by phase, and pass its notes on."""
        for phase, spent in seconds.items():
            self.seconds[name][phase] += spent
        for note in notes:
            self.observer.note(note)


@dataclass
class Barrier:
    """Where agents wait until a step is closed. Then the agents are released: they continue.

    Example: Barrier(arrived={"wren"}) waits for the other agents of the step
    """

    arrived: set[str] = field(default_factory=set)
    released: bool = False  # whether agents may continue
    release_event: asyncio.Event = field(default_factory=asyncio.Event)
    """What agents wait for. It is set just after `released`, so that all agents continue in the
    order of their arrival."""
    overdue: bool = False  # whether the deadline has passed


class Team:
    """The agents of a run and their progress."""

    def __init__(
        self, config: Config, run: RunDirectory, pool: Pool, executor: Executor, log: MetricsLog
    ) -> None:
        self.config, self.run, self.pool = config, run, pool
        self.executor, self.log, self.observer = executor, log, log.observer
        self.names = [a.name for a in config.agents]
        self.learners = [a.name for a in config.agents if a.learns]
        folders = {
            n: Checkpoints(run.checkpoints(n), config.checkpoint.keep) for n in self.learners
        }
        self.first = first_step(run, folders, self.observer.note)
        self.damaged = damaged_batches(config, run, pool, self.first, self.observer.note)
        self.active = set(self.names)
        """Agents that still take part; one that is lost too often leaves."""
        self.saved = {n: {self.first} if self.first else set[int]() for n in self.learners}
        """Steps saved by this process, and the one it resumed from. An agent may restart from them."""
        self.improved: dict[str, set[int]] = defaultdict(set)
        """Steps with a new best held-out accuracy; each gets a checkpoint."""
        self.pruned = dict.fromkeys(self.learners, self.first)
        """The step up to which an agent's older checkpoints were removed."""
        self.steps_done = dict.fromkeys(self.names, self.first)
        """How many steps an agent has finished."""
        self.losses = dict.fromkeys(self.names, 0)
        """How often an agent was lost since it last finished a step."""
        self.barriers: dict[int, Barrier] = defaultdict(Barrier)
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def train(self) -> None:
        """Run every agent to the last step."""
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.names:
                    self.tasks[name] = group.create_task(self.run_with_restarts(name))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.run.metric_rows()  # an error if the file was deleted during the last step
        self.check_pool(0, self.config.steps)

    async def run_agent(self, name: str) -> None:
        """One agent, from its newest checkpoint to the last step."""
        call, steps = self.executor.call, self.config.steps
        restored = await call(name, "restore", sorted(self.saved.get(name, ())))
        # A frozen agent has no checkpoint: it continues where it was.
        step = self.steps_done[name] if restored is None else restored
        for damaged in self.damaged[name]:
            await call(name, "republish", damaged)
        await self.barrier(name, START)
        if step == 0:
            await self.evaluate(name, 0)
        while step < steps:
            row: dict[str, Any] = ABSENT
            # A restarted agent repeats steps. If the step has a metrics row, its batch is published:
            # learn only.
            if self.takes_part(name, step) and not self.log.has("train", step, name):
                row = await call(name, "rollout", step)
            await self.barrier(name, step)
            if not self.pool.is_away(step):
                row = row if self.takes_part(name, step) else ABSENT
                learned = await call(name, "learn", step) if name in self.learners else {}
                self.log.add("train", step, name, {**row, **learned})
            step += 1
            await self.evaluate(name, step)
            await self.save(name, step)
            self.finished(name, step)
            await self.prune(name)
        await self.barrier(name, steps)
        await self.prune(name)

    # ------------------------------------------------------------ after a step

    async def evaluate(self, name: str, done: int) -> None:
        if name in self.to_evaluate(done) and not self.log.has("evaluation", done, name):
            row, best = await self.executor.call(name, "evaluate", done)
            if best:
                self.improved[name].add(done)
            self.log.add("evaluation", done, name, row)

    async def save(self, name: str, done: int) -> None:
        settings = self.config.checkpoint
        wanted = self.due(done, settings.every) or done in self.improved[name]
        if wanted and settings.save and name in self.learners and done not in self.saved[name]:
            await self.executor.call(name, "save", done)
            self.saved[name].add(done)

    async def prune(self, name: str) -> None:
        """Remove old checkpoints once all learners have saved a newer step. At least one checkpoint
        step common to all learners always remains, so that the run can always be resumed."""
        if name not in self.learners:
            return
        common = max(set.intersection(*self.saved.values()), default=0)
        if common > self.pruned[name]:
            self.pruned[name] = common
            # Newer ones stay, too: a straggler has yet to save them.
            keep = sorted(step for step in self.saved[name] if step >= common)
            await self.executor.call(name, "prune", keep)

    def finished(self, name: str, done: int) -> None:
        seconds = self.executor.seconds.pop(name, {})
        if self.pool.waited:
            seconds["wait"], self.pool.waited = self.pool.waited, 0.0
        if seconds:
            self.run.add_times({"step": done - 1, "agent": name, **seconds})
        if done > self.steps_done[name]:
            self.steps_done[name], self.losses[name] = done, 0

    def to_evaluate(self, done: int) -> list[str]:
        """The agents to evaluate after this many steps. A frozen agent is evaluated once."""
        settings = self.config.evaluation
        if not settings.problems or not (done == 0 or self.due(done, settings.every)):
            return []
        return [a.name for a in self.config.agents if a.learns or (done == 0 and not a.replay)]

    def due(self, done: int, every: int) -> bool:
        """Whether something that is done every `every` steps, and after the last one, is due now."""
        regular = every > 0 and done % every == 0 and not self.pool.is_away(done - 1)
        return done == self.config.steps or regular

    # ------------------------------------------------------------ lost agents

    async def run_with_restarts(self, name: str) -> None:
        """Run an agent; when its process is lost, run it again from its newest checkpoint."""
        while name in self.active:
            try:
                return await self.run_agent(name)
            except AgentLost as lost:
                if self.barriers[self.config.steps].released:
                    return  # the run is complete
                self.lost(name, str(lost))

    def lost(self, name: str, reason: str) -> None:
        """Note the loss. An agent that is lost too often stops the run, or leaves the team."""
        self.losses[name] += 1
        count, step = self.losses[name], self.steps_done[name]
        what = f"agent {name!r} was lost in step {step + 1} ({reason})"
        if count < MAX_LOSSES:
            newest = max(self.saved.get(name, ()), default=0)
            how = (
                f"the checkpoint of step {newest}"
                if newest
                else "the beginning, without a checkpoint"
            )
            how = how if name in self.learners else "this step: it does not learn"
            return self.observer.note(f"{what}. It restarts from {how}.")
        what += f" for the {MAX_LOSSES}th time"
        others = (self.active & set(self.learners)) - {name}
        loading = not self.barriers[START].released
        if self.config.runtime.late == "wait" or not others or loading:
            raise RunStopped(f"{what}. Fix the cause, then run `hacrl resume {self.run.path}`.")
        self.observer.note(f"{what}. The other agents continue without it.")
        self.active.remove(name)
        self.log.release([name])
        for step in list(self.barriers):
            self.release_if_complete(step)

    # ------------------------------------------------------------ barriers

    async def barrier(self, name: str, step: int) -> None:
        """Wait until the step is closed. Returns at once for a step that is closed already.

        The first expected agent to arrive starts the deadline timer."""
        barrier = self.barriers[step]
        barrier.arrived.add(name)
        self.release_if_complete(step)
        first = step != START and barrier.arrived & set(self.expected(step)) == {name}
        try:
            async with asyncio.timeout(self.config.runtime.deadline if first else None):
                await barrier.release_event.wait()
        except TimeoutError:
            self.deadline_passed(step)
            await barrier.release_event.wait()

    def release_if_complete(self, step: int) -> None:
        """Release the agents at the barrier if no other agent must be waited for."""
        barrier = self.barriers[step]
        if barrier.released or not barrier.arrived:
            return
        expected = set(self.expected(step))
        a_learner_is_here = bool(barrier.arrived & expected & set(self.learners))
        skip_missing = barrier.overdue and self.config.runtime.late == "go_on" and a_learner_is_here
        complete = barrier.arrived >= expected or skip_missing
        if complete or (0 <= step < self.config.steps and self.pool.closed(step)):
            self.release(step)

    def expected(self, step: int) -> list[str]:
        """The agents that the barrier waits for."""
        if 0 <= step < self.config.steps and self.pool.is_away(step):
            return []
        return [name for name in self.names if name in self.active]

    def deadline_passed(self, step: int) -> None:
        """Report who is missing. With late = "go_on" the step continues without them as soon as
        one learner has arrived."""
        barrier = self.barriers[step]
        if barrier.released:
            return
        barrier.overdue = True
        if self.config.runtime.late == "wait":
            self.note_missing(step, "is still waiting for")
        self.release_if_complete(step)

    def note_missing(self, step: int, verb: str) -> None:
        missing = ", ".join(sorted(set(self.expected(step)) - self.barriers[step].arrived))
        place = f"step {step + 1}" if step < self.config.steps else "the end of the run"
        self.observer.note(
            f"{place} {verb} {missing}, which missed the deadline ({self.config.runtime.deadline:g} "
            "seconds after the first agent)."
        )

    def release(self, step: int) -> None:
        """Close the step, then let the agents that wait at its barrier continue."""
        barrier = self.barriers[step]
        if step == START:
            for old in range(self.first):
                self.pool.close(old, self.names)
            self.log.open(self.config)
            self.observer.started(self.config, self.run, self.first)
            if self.first == 0:
                self.log.expect("evaluation", 0, self.to_evaluate(0))
        elif step < self.config.steps:
            self.close(step)
        elif stragglers := self.active - barrier.arrived:
            self.note_missing(step, "does not wait for")
            self.log.release(stragglers)
            for name in stragglers:
                self.tasks[name].cancel()
        barrier.released = True
        asyncio.get_running_loop().call_soon(barrier.release_event.set)

    # ------------------------------------------------------------ snapshots

    def takes_part(self, name: str, step: int) -> bool:
        """Whether the agent is in the step's snapshot, or still can be."""
        if self.pool.is_away(step):
            return False
        return name in self.pool.members(step) if self.pool.closed(step) else True

    def close(self, step: int) -> None:
        """Write the step's snapshot unless it exists, and check its members."""
        self.check_pool(max(step - 1, 0), step)
        expected, arrived = self.expected(step), self.barriers[step].arrived
        if not self.pool.closed(step):
            missing = set(expected) - arrived
            if missing:
                self.note_missing(step, "continues without")
            # A lost agent that is not back yet may have published before it was lost.
            here = [n for n in expected if n in arrived or n in self.pool.arrived(step)]
            self.pool.close(step, here)
        members = self.pool.members(step)
        waits = self.config.runtime.late == "wait"
        others = set(members) - set(self.names) or (waits and set(self.names) - set(members))
        if others and self.config.hub is None:  # a hub decides who is in a step
            raise UserError(
                f"{self.run.path}: step {step + 1} was closed with the agents "
                f"{', '.join(members)}, but the config has {', '.join(self.names)}. Start a new run."
            )
        absent = [n for n in expected if n not in members]
        self.log.release(absent)
        self.log.expect("train", step, [n for n in self.names if n in members])
        evaluated = [n for n in self.to_evaluate(step + 1) if n in self.active and n not in absent]
        self.log.expect("evaluation", step + 1, evaluated)

    def check_pool(self, first: int, end: int) -> None:
        """Raise a UserError if a snapshot of these closed steps was deleted."""
        for step in range(first, end):
            if not self.pool.closed(step):
                way = f"`hacrl resume {self.run.path}` writes it again from the journals"
                raise changed(self.pool.folder, f"step {step + 1} was deleted during the run", way)
