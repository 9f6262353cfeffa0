"""All agents in one process, phases in turn."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

from hacrl.config import Config
from hacrl.policy.sharding.followers import LocalRanks
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.observer import Observer
from hacrl.training.seat import Answer, Seat, share
from hacrl.training.team import Call, Lost, Team


def run_local(config: Config, run: RunDirectory, observer: Observer) -> None:
    """Train until `config.steps`, from the newest checkpoint that all learners have."""
    observer.phase("loading")
    with ExitStack() as stack:
        Team(config, run, observer).train(LocalCrew(config, run, stack), stack)
    observer.finished()


class LocalCrew:
    """Carries out one call at a time, in the order in which they came: so all members make their
    rollouts, then all learn."""

    def __init__(self, config: Config, run: RunDirectory, stack: ExitStack) -> None:
        self.pool = Pool(run.pool_path)
        ranks = stack.enter_context(LocalRanks(config))
        shared = share(config, run, self.pool, stack, ranks.policy)
        self.seats = {a.name: Seat(config, a.name, run, shared) for a in config.agents}
        self.calls: deque[tuple[str, Call]] = deque()

    def begin(self, name: str, call: Call) -> None:
        self.calls.append((name, call))

    def next(self, seconds: float | None) -> tuple[str, Answer | Lost]:
        name, call = self.calls.popleft()
        return name, self.seats[name].answer(call.method, *call.args)
