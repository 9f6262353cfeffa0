"""What the driver of a run does, wherever its members are: it lets each of them take its steps,
closes every step, and keeps the books.

A member's life is written once (`_life`), as a generator: it yields calls to its seat and waits for
the answers, and it waits at every cut, nowhere else. A crew carries the calls out: one after the
other in this process (local.py), or side by side in actors (ray.py), where a member may be lost and
begins its life again from its newest checkpoint.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from hacrl.config import Config
from hacrl.errors import RunStopped, UserError
from hacrl.store.checkpoint import Checkpoints, newest_common
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.logbook import Logbook
from hacrl.training.loggers import open_loggers
from hacrl.training.observer import Observer
from hacrl.training.seat import Answer

MOST_LOSSES = 5
"""A member lost so often in one step does not come back: something is wrong with it, not with its
machine."""

_PHASES = {
    "restore": "loading",
    "rollout": "rollouts",
    "learn": "learning",
    "evaluate": "evaluating",
    "save": "checkpoint",
}
_ABSENT = {"reward": None, "rollouts": 0, "not_attempted": 0, "absent": True}
"""The rollout metrics of a member that a step was closed without."""


@dataclass(frozen=True)
class Call:
    """A method of a seat and its arguments.

    Example: Call("rollout", (3,))
    """

    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Gate:
    """Where members wait for one another: the cut of a step; START; or the end, Gate(steps)."""

    step: int


START = Gate(-1)


@dataclass(frozen=True)
class Lost:
    """Instead of an answer: the member's process or machine is gone."""

    reason: str


Life = Generator[Call | Gate, Any, None]


class Crew(Protocol):
    """Carries calls out. A member has at most one on its way."""

    pool: Pool

    def begin(self, name: str, call: Call) -> None: ...

    def next(self, seconds: float | None) -> tuple[str, Answer | Lost] | None:
        """The next answer, or None when `seconds` have passed without one. What a member raised is
        raised here."""


class Team:
    """The members of a run, and what is known about them."""

    def __init__(self, config: Config, run: RunDirectory, observer: Observer) -> None:
        self.config, self.run, self.observer = config, run, observer
        self.names = [a.name for a in config.agents]
        self.learners = [a.name for a in config.agents if a.learns]
        keep = config.checkpoint.keep
        folders = {n: Checkpoints(run.checkpoints(n), keep) for n in self.learners}
        self.first = newest_common(folders, observer.note) or 0
        run.rewind(self.first)
        self.saved = {n: {self.first} if self.first else set[int]() for n in self.learners}
        """Checkpoints of this run's history: what a member may come back from."""
        self.improved: dict[str, set[int]] = defaultdict(set)
        self.pruned = dict.fromkeys(self.learners, self.first)
        self.reached = dict.fromkeys(self.names, self.first)
        """The first step that a member has not finished."""
        self.losses = dict.fromkeys(self.names, 0)
        """How often a member was lost in that step."""
        self.rollouts: dict[tuple[int, str], dict[str, Any]] = {}
        """Metrics of rollouts whose member has not learned yet."""
        self.cuts: dict[int, tuple[str, ...]] = {}
        """The members of closed steps, as far as they were asked for."""
        self.times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.lives: dict[str, Life] = {}
        self.gate = START
        """The one that opens next; `waiting` are there, since `since`."""
        self.waiting: set[str] = set()
        self.since: float | None = None
        self.told = False

    def train(self, crew: Crew, stack: ExitStack) -> None:
        """Run until every member has made `config.steps` steps."""
        self.crew = crew
        for name in self.names:
            self._begin_life(name)
        self._work_until_open()
        loggers = open_loggers(self.run, self.config)
        for logger in loggers:
            stack.callback(logger.close)
        self.book = Logbook(self.run, self.observer, loggers)
        self.observer.started(self.config, self.run, self.first)
        if self.first == 0:
            self.book.expect("evaluation", 0, self._evaluated(0))
        self._let_through(Gate(self.first))
        while self.lives:
            self._work_until_open()
            if self.gate.step < self.config.steps:
                self._close(self.gate.step)
            self._let_through(Gate(self.gate.step + 1))

    # ------------------------------------------------------------ one member

    def _life(self, name: str) -> Life:
        """All that a member does, from its newest checkpoint to the end of the run."""
        restored: int | None = yield Call("restore", (sorted(self.saved.get(name, ())),))
        step = self.reached[name] if restored is None else restored
        yield START
        if step == 0:
            yield from self._evaluate(name, 0)
        while step < self.config.steps:
            yield from self._step(name, step)
            step += 1
            yield from self._evaluate(name, step)
            yield from self._save(name, step)
            self._finished(name, step)
            yield from self._prune(name)
        yield Gate(self.config.steps)
        yield from self._prune(name)

    def _step(self, name: str, step: int) -> Life:
        """Rollouts, the cut, learning. What was done before the member was lost is not done again,
        except learning: the weights of its checkpoint have yet to learn it."""
        agent = self.config.agent(name)
        if agent.is_away(step):
            yield Gate(step)
            return
        known = self.book.has("train", step, name) or (step, name) in self.rollouts
        if self._takes_part(name, step) and not known:
            self.rollouts[step, name] = yield Call("rollout", (step,))
        yield Gate(step)
        row = self.rollouts.get((step, name), {}) if self._takes_part(name, step) else _ABSENT
        if agent.learns:
            row = {**row, **(yield Call("learn", (step,)))}
        self.book.add("train", step, name, row)
        self.rollouts.pop((step, name), None)

    def _evaluate(self, name: str, done: int) -> Life:
        if name not in self._evaluated(done) or self.book.has("evaluation", done, name):
            return
        row, best = yield Call("evaluate", (done,))
        if best:
            self.improved[name].add(done)
        self.book.add("evaluation", done, name, row)

    def _save(self, name: str, done: int) -> Life:
        settings = self.config.checkpoint
        wanted = self._due(done, settings.every) or done in self.improved[name]
        if name in self.learners and settings.save and wanted and done not in self.saved[name]:
            yield Call("save", (done,))
            self.saved[name].add(done)

    def _prune(self, name: str) -> Life:
        """When all learners have saved a newer step: at every moment one is whole for all."""
        common = max(set.intersection(*self.saved.values()), default=0)
        if name in self.learners and common > self.pruned[name]:
            self.pruned[name] = common
            # Newer ones, too: a late member has yet to save them, and then one of them is common.
            yield Call("prune", (sorted(s for s in self.saved[name] if s >= common),))

    def _finished(self, name: str, done: int) -> None:
        seconds = self.times.pop(name, {})
        beside: dict[str, float] = {}
        for phase in {"evaluate", "checkpoint"} & seconds.keys():
            beside[phase] = seconds.pop(phase)
        for owner, spent in ((name, seconds), ("", beside)):
            if spent:
                self.run.add_times({"step": done - 1, "agent": owner, **spent})
        if done > self.reached[name]:
            self.reached[name] = done
            self.losses[name] = 0

    def _evaluated(self, done: int) -> list[str]:
        """Who is evaluated after so many steps. Frozen: the first result stands."""
        settings = self.config.evaluation
        if not settings.problems or not (done == 0 or self._due(done, settings.every)):
            return []
        return [a.name for a in self.config.agents if a.learns or (done == 0 and not a.replay)]

    def _due(self, done: int, every: int) -> bool:
        return done == self.config.steps or (every > 0 and done % every == 0)

    # ------------------------------------------------------------ calls, answers, losses

    def _begin_life(self, name: str) -> None:
        self.lives[name] = self._life(name)
        self._go_on(name, None)

    def _go_on(self, name: str, value: Any) -> None:
        """Give a member its answer; it goes on to its next call or closed gate, or has finished."""
        life = self.lives[name]
        while True:
            try:
                wanted = life.send(value)
            except StopIteration:
                del self.lives[name]
                return
            if isinstance(wanted, Call):
                self.observer.phase(_PHASES.get(wanted.method, wanted.method))
                return self.crew.begin(name, wanted)
            if wanted.step >= self.gate.step:
                assert wanted == self.gate, f"{name} is ahead of the others"
                self.waiting.add(name)
                if name in self._expected():  # who is away has published nothing
                    self.since = self.since or time.monotonic()
                return
            value = None

    def _work_until_open(self) -> None:
        """Take answers until the next gate may open."""
        while self.lives and not self._opens():
            found = self.crew.next(self._patience())
            if found is None:
                continue
            name, answer = found
            if isinstance(answer, Lost):
                self._lost(name, answer.reason)
                continue
            for phase, seconds in (answer.seconds | answer.beside).items():
                self.times[name][phase] += seconds
            for note in answer.notes:
                self.observer.note(note)
            self._go_on(name, answer.value)

    def _lost(self, name: str, reason: str) -> None:
        """Let a lost member begin again, unless that has not helped for long."""
        del self.lives[name]
        self.waiting.discard(name)
        if self.gate.step > self.config.steps:
            return  # it had nothing more to do
        self.losses[name] += 1
        told = f"agent {name!r} was lost in step {self.reached[name]} ({reason})"
        if self.losses[name] < MOST_LOSSES:
            self.observer.note(f"{told}; it begins again from its newest checkpoint.")
            return self._begin_life(name)
        told += f", for the {MOST_LOSSES}th time"
        others = [n for n in self.learners if n in self.lives]
        if self.config.runtime.late == "wait" or not others or self.gate == START:
            raise RunStopped(f"{told}. See why it dies, then `hacrl resume {self.run.path}`.")
        self.observer.note(f"{told}; the others go on without it.")
        self.book.release([name])

    # ------------------------------------------------------------ gates

    def _opens(self) -> bool:
        """Whether all are at the gate that it waits for, or it need not wait any longer."""
        if self.waiting >= set(self.lives):
            return True
        if self.gate == START:
            return False  # a team starts together
        if self.waiting >= set(self._expected()):
            return True
        if self.gate.step in self.cuts:  # of a run that was resumed: nothing to wait for
            return bool(self.waiting)
        return self._overdue()

    def _overdue(self) -> bool:
        """At the deadline: say who is missing, and whether to go on."""
        if self.told or self._patience() != 0.0:
            return False
        settings, missing = self.config.runtime, set(self._expected()) - self.waiting
        at_end = self.gate.step == self.config.steps
        self.told = True
        self.observer.note(
            f"{'the end of the run' if at_end else f'step {self.gate.step}'} "
            f"{'goes on without' if settings.late == 'go_on' else 'still waits for'} "
            f"{', '.join(sorted(missing))}: not there {settings.deadline:g} seconds after the first."
        )
        return settings.late == "go_on"

    def _patience(self) -> float | None:
        """Seconds until the deadline; None where there is none, or none any more."""
        settings = self.config.runtime
        if settings.deadline is None or self.since is None or self.told or self.gate == START:
            return None
        here = self.waiting & set(self._expected())
        if settings.late == "go_on" and not here & set(self.learners):
            return None  # nobody could learn: wait at least for one who can
        return max(0.0, self.since + settings.deadline - time.monotonic())

    def _let_through(self, next_gate: Gate) -> None:
        """Open the gate: whoever waits there goes on, in the team's order."""
        at_end = self.gate.step == self.config.steps
        through = [n for n in self.names if n in self.waiting]
        for name in [n for n in self.lives if at_end and n not in through]:
            del self.lives[name]  # the run ends without those who are far behind
            self.book.release([name])
        self.gate, self.waiting, self.since, self.told = next_gate, set(), None, False
        if next_gate.step < self.config.steps and self.crew.pool.closed(next_gate.step):
            self.cuts[next_gate.step] = self.crew.pool.members(next_gate.step)
        for name in through:
            self._go_on(name, None)

    # ------------------------------------------------------------ cuts

    def _expected(self) -> list[str]:
        """Whom the next gate waits for: at the end for all, else for those that are not away."""
        step = self.gate.step
        here = [a for a in self.config.agents if a.name in self.lives]
        return [a.name for a in here if step >= self.config.steps or not a.is_away(step)]

    def _takes_part(self, name: str, step: int) -> bool:
        """Whether the member counts in the step's cut, or still may."""
        if step not in self.cuts and step < self.gate.step:  # closed before this run was resumed
            self.cuts[step] = self.crew.pool.members(step)
        return name in self.cuts.get(step, self.names)

    def _close(self, step: int) -> None:
        """Commit the step's cut; whoever closed it before must have meant the same members."""
        pool, expected = self.crew.pool, self._expected()
        if step not in self.cuts:
            here = expected
            if not self.waiting >= set(expected):  # a lost member may have arrived before
                here = [n for n in expected if n in pool.arrived(step)]
            if not here:
                raise RunStopped(
                    f"step {step}: whoever is not away was lost too often, so nobody is left to take "
                    f"part. See why they die, then `hacrl resume {self.run.path}`."
                )
            pool.close(step, here)
            self.cuts[step] = pool.members(step)
        members, late = self.cuts[step], self.config.runtime.late
        present = [a.name for a in self.config.agents if not a.is_away(step)]
        if not set(members) <= set(present) or (late == "wait" and len(members) < len(present)):
            raise UserError(
                f"{pool.folder}: step {step} was closed by a run whose members are "
                f"{', '.join(members)}, not {', '.join(present)}. Start a new run in another directory."
            )
        late_ones = [n for n in expected if n not in members]
        self.book.release(late_ones)
        self.book.expect("train", step, [n for n in self.names if n in members])
        there = [n for n in self._evaluated(step + 1) if n in self.lives and n not in late_ones]
        self.book.expect("evaluation", step + 1, there)
