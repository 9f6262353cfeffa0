"""The process pool: every call has a wall-clock limit, and nothing a verifier does stalls a run.

    hangs                      its process group is killed, that call is TIMEOUT
    dies (exit, signal)        that call is ERROR
    raises                     that call is ERROR, with the exception's type and message
    prints                     goes nowhere

Calls that waited behind such a call on the same worker are given to another one, uncharged. A new
worker is warmed up before any clock runs.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from hacrl.errors import UserError, describe
from hacrl.types import Problem, Verdict
from hacrl.verify import wire
from hacrl.verify.kinds import make_verifier
from hacrl.verify.process import WorkerProcess
from hacrl.verify.protocol import Verifier, failed, guarded_judge, timed_out
from hacrl.verify.settings import VerifierConfig

AHEAD = 8
"""Most calls sent to one worker beyond the one it is on; fewer near the end, to share the rest."""
START_LIMIT = 120.0
"""Seconds a worker may take to say hello."""
MOST_FAILED_STARTS = 3
"""In a row; then the machine is at fault, and the run stops with a message."""
_LOOK_EVERY = 0.25
"""Seconds between looks at worker processes that keep silent."""


class _Batch:
    """The calls of one judge_all: what is still to be handed out and what has been found."""

    def __init__(self, items: Sequence[tuple[str, Problem]]) -> None:
        self.items = items
        self.waiting = deque(range(len(items)))
        self.verdicts: dict[int, Verdict] = {}


class VerifierPool:
    """Judges replies in separate processes.

    Example:
        with VerifierPool(VerifierConfig(kind="number")) as pool:
            verdicts = pool.judge_all([("17 + 25 = 42", problem)])
    """

    def __init__(self, settings: VerifierConfig) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._closed = False
        self._failed_starts = 0
        self._hello: dict | None = None
        self._inline: Verifier | None = None
        self._workers: list[WorkerProcess] = []
        if settings.num_workers == 0:
            self._inline = make_verifier(settings)
        else:  # they warm up while the caller goes on
            self._staff()

    @property
    def label(self) -> str:
        """ "name/version", for `Trajectory.verifier`. Waits for the first worker."""
        if self._inline is not None:
            return f"{self._inline.name}/{self._inline.version}"
        hello = self._first_hello()
        return f"{hello['name']}/{hello['version']}"

    @property
    def reward_range(self) -> tuple[float, float]:
        """The verifier's declared range. Waits for the first worker."""
        if self._inline is not None:
            return self._inline.reward_range
        low, high = self._first_hello()["reward_range"]
        return low, high

    def judge_all(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """One verdict for each (reply, problem), in the same order. UserError if the verifier
        cannot be started at all."""
        with self._lock:
            if self._closed:
                raise ValueError("this VerifierPool is closed")
            if self._inline is not None:
                return [guarded_judge(self._inline, reply, problem) for reply, problem in items]
            try:
                return self._run(_Batch(items))
            except BaseException:
                # Interrupted half-way: answers still on their way must not meet the next batch.
                self._drop_busy()
                raise

    def wait_ready(self) -> None:
        """Waits until all workers are warm (judge_all only waits for the first)."""
        with self._lock:
            self._staff()
            while not all(worker.ready for worker in self._workers):
                self._tend(_Batch([]))

    def close(self) -> None:
        """Ends all workers now."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first_hello(self) -> dict:
        with self._lock:
            while self._hello is None:
                if self._closed:
                    raise ValueError("this VerifierPool is closed")
                self._tend(_Batch([]))
            return self._hello

    def _run(self, batch: _Batch) -> list[Verdict]:
        self._look_after(batch)  # a worker that died idle is replaced before it is given work
        while batch.waiting or any(worker.queued for worker in self._workers):
            self._hand_out(batch)
            self._tend(batch)
        return [batch.verdicts[number] for number in range(len(batch.items))]

    def _hand_out(self, batch: _Batch) -> None:
        """Fills the queues of ready workers, evenly once little is left."""
        for worker in self._workers:
            if not worker.ready:
                continue
            share = 1 + min(AHEAD, len(batch.waiting) // (2 * len(self._workers)))
            while batch.waiting and len(worker.queued) < share:
                number = batch.waiting.popleft()
                try:
                    payload = wire.pack_call(*batch.items[number])
                except Exception as error:  # a column's value may fail to pickle in any way
                    batch.verdicts[number] = failed(f"cannot be sent: {describe(error)}")
                    continue
                worker.send(number, payload)
            worker.flush()

    def _tend(self, batch: _Batch) -> None:
        """Waits until something happens, then looks after every worker."""
        self._staff()
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
                selector.register(worker.socket, events)
            selector.select(self._patience())
        for worker in self._workers:
            worker.flush()
        self._look_after(batch)

    def _patience(self) -> float:
        """Seconds until the next clock runs out, but not long."""
        now, limit = time.monotonic(), self.settings.timeout
        left = [worker.clock + limit - now for worker in self._workers if worker.queued]
        return max(0.0, min([_LOOK_EVERY, *left]))

    def _look_after(self, batch: _Batch) -> None:
        """Takes answers in first, then judges clocks: a call whose answer has come is in time,
        however long this process was kept from reading it."""
        for worker in list(self._workers):
            answers, alive = worker.receive()
            batch.verdicts.update(answers)
            if worker.refusal:
                raise UserError(worker.refusal)
            if worker.hello is not None:
                self._hello, self._failed_starts = worker.hello, 0
            age = time.monotonic() - worker.clock
            if not alive:
                self._bury(worker, batch, None)
            elif worker.queued and age > self.settings.timeout:
                self._bury(worker, batch, timed_out(self.settings.timeout))
            elif not worker.ready and age > START_LIMIT:
                self._bury(worker, batch, None)

    def _bury(self, worker: WorkerProcess, batch: _Batch, verdict: Verdict | None) -> None:
        """Ends a worker, charges the call it was on, and gives the calls behind it back."""
        how = worker.kill(dying=verdict is None)
        self._workers.remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS:
                self._failed_starts = 0
                raise UserError(
                    f"verifier {self.settings.kind!r}: its worker does not start: {how}"
                )
        if worker.queued:
            number = worker.queued.popleft()
            batch.verdicts[number] = verdict or failed(f"the verifier's process died: {how}")
            batch.waiting.extendleft(reversed(worker.queued))

    def _staff(self) -> None:
        """Starts workers where some are missing."""
        while len(self._workers) < self.settings.num_workers:
            worker = WorkerProcess(self.settings)
            worker.flush()
            self._workers.append(worker)

    def _drop_busy(self) -> None:
        for worker in [worker for worker in self._workers if worker.queued]:
            worker.kill()
            self._workers.remove(worker)
