"""The pool of worker processes: every call has a time limit, and no verifier can stall a run.

    a call hangs                   its process is killed; twice: the call is TIMEOUT
    the process dies               a new one is started; twice: the call is ERROR
    it is out of memory            the same; the process ends, because a leak stays
    the verifier raises            the call is ERROR, with the exception's type and message
    the verifier prints            the output is discarded

A call that ends its process is repeated once in a new process, so a kill from outside, or a pause of
all processes, changes no verdict. A call that really hangs costs two time limits.

Each call has its own clock. Calls sent to a worker behind a bad call are sent again to another worker.
A new worker is warmed up before the clock of any call starts.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Self

from hacrl import stopping
from hacrl.errors import UserError, describe
from hacrl.types import Problem, Status, Verdict
from hacrl.verify.process import WorkerProcess, pack_call
from hacrl.verify.protocol import Verifier, failed, guarded_judge, introduction
from hacrl.verify.settings import VerifierConfig, code_digests, make_verifier

AHEAD = 8  # calls sent to a worker behind the one it works on; fewer near the end of a batch
START_LIMIT = 120.0  # seconds until a new worker must be ready
MAX_FAILED_STARTS = 3  # failed starts in a row that stop the run
SLOW = 20.0  # seconds of a batch after which the pool reports that the verifier is slow
_POLL = 0.25  # seconds between checks for workers that died without closing their socket


class _Batch:
    """The calls of one judge_all, numbered from 0."""

    def __init__(self, items: Sequence[tuple[str, Problem]]) -> None:
        self.items = items
        self.waiting = deque(range(len(items)))
        self.again: deque[int] = deque()
        """Calls whose worker died or was too slow; each is repeated alone in a new worker."""
        self.repeated: dict[int, Verdict] = {}
        """Calls that were or will be repeated, with the reason."""
        self.verdicts: dict[int, Verdict] = {}
        self.began = time.monotonic()

    def take(self, worker: WorkerProcess, num_workers: int) -> dict[int, bytes]:
        """The next calls for a worker, packed; those that cannot be packed are ERROR."""
        packed = {}
        if self.again and not worker.used:
            calls = [self.again.popleft()]
        else:
            count = min(len(self.waiting), 1 + min(AHEAD, len(self.waiting) // (2 * num_workers)))
            calls = [self.waiting.popleft() for _ in range(count)]
        for call in calls:
            try:
                packed[call] = pack_call(*self.items[call])
            except Exception as error:  # pickle raises anything for a column's value
                self.verdicts[call] = failed(f"cannot be sent: {describe(error)}")
        return packed

    def give_back(self, calls: deque[int], verdict: Verdict) -> None:
        """The calls of a killed worker: the first is repeated, or gets the verdict if it was
        repeated before; the others wait again."""
        if calls:
            first = calls.popleft()
            if first in self.repeated:
                self.verdicts[first] = verdict
            else:
                self.repeated[first] = verdict
                self.again.append(first)
            self.waiting.extendleft(reversed(calls))


class VerifierPool:
    """Judges replies in separate processes.

    Example:
        with VerifierPool(VerifierConfig(kind="number")) as pool:
            verdicts = pool.judge_all([("17 + 25 = 42", problem)])
    """

    def __init__(self, settings: VerifierConfig) -> None:
        self.settings = settings
        self.report: Callable[[str], object] = lambda text: None
        """Called once, with a sentence for the user, when the verifier is slow."""
        self._reported = False
        self._lock = threading.RLock()
        self._closed = False
        self._failed_starts = 0
        self._hello: dict[str, Any] | None = None
        self._inline: Verifier | None = None
        self._workers: list[WorkerProcess] = []
        self._code = code_digests(settings)
        if settings.num_workers == 0:
            self._inline = make_verifier(settings)
            self._hello = introduction(self._inline)
        else:  # they warm up in the background
            self._start_missing()

    @property
    def label(self) -> str:
        """ "name/version", for `Trajectory.verifier`. Waits for the first worker."""
        hello = self._first_hello()
        return f"{hello['name']}/{hello['version']}"

    @property
    def reward_range(self) -> tuple[float, float]:
        """The verifier's declared range. Waits for the first worker."""
        low, high = self._first_hello()["reward_range"]
        return low, high

    def judge_all(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """One verdict for each (reply, problem), in the same order. UserError if the verifier
        cannot be started."""
        with self._lock:
            if self._closed:
                raise ValueError("this VerifierPool is closed")
            if self._inline is not None:
                return [self._judge_inline(*item) for item in items]
            try:
                return self._judge(_Batch(items))
            except BaseException:
                # Late answers must not be taken for answers to the next batch.
                for worker in [worker for worker in self._workers if worker.calls]:
                    self._remove(worker)
                raise

    def wait_ready(self) -> None:
        """Wait until all workers are ready (judge_all waits only for the first)."""
        with self._lock:
            self._start_missing()
            while not all(worker.ready for worker in self._workers):
                self._wait(_Batch([]))

    def close(self) -> None:
        """Kill all workers."""
        with self._lock:
            self._closed = True
            for worker in list(self._workers):
                self._remove(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _first_hello(self) -> dict[str, Any]:
        with self._lock:
            while self._hello is None:
                if self._closed:
                    raise ValueError("this VerifierPool is closed")
                self._wait(_Batch([]))
            return self._hello

    def _judge_inline(self, reply: str, problem: Problem) -> Verdict:
        assert self._inline is not None
        stopping.check()
        columns, asked = deepcopy((dict(problem.columns), dict(problem.asked)))  # as in a worker
        return guarded_judge(self._inline, reply, replace(problem, columns=columns, asked=asked))

    def _judge(self, batch: _Batch) -> list[Verdict]:
        self._check(batch)  # replaces workers that died between two batches
        while len(batch.verdicts) < len(batch.items):
            for worker in self._workers:
                idle = worker.ready and not worker.calls
                if idle and (calls := batch.take(worker, len(self._workers))):
                    worker.send(calls)
            self._wait(batch)
            if time.monotonic() - batch.began > SLOW:
                self._report_slow(batch)
        return [batch.verdicts[call] for call in range(len(batch.items))]

    def _wait(self, batch: _Batch) -> None:
        """Wait for an answer, a death or a time limit, then check every worker."""
        stopping.check()
        self._start_missing()
        now, limit = time.monotonic(), self.settings.timeout
        left = [worker.clock + limit - now for worker in self._workers if worker.calls]
        wait([worker.socket for worker in self._workers], max(0.0, min([_POLL, *left])))
        self._check(batch)

    def _check(self, batch: _Batch) -> None:
        """Collect answers and end workers that are dead or too slow. Answers come first: a call
        whose answer has arrived is in time, however late this process reads it."""
        for worker in list(self._workers):
            batch.verdicts.update(worker.receive())
            if worker.error and not worker.ready:
                raise UserError(worker.error)
            if worker.ready:
                self._hello, self._failed_starts = worker.hello, 0
            age = time.monotonic() - worker.clock
            if not worker.alive or (not worker.ready and age > START_LIMIT):
                how = self._remove(worker, dying=True)
                self._failed_starts += not worker.ready
                if self._failed_starts >= MAX_FAILED_STARTS:
                    kind, self._failed_starts = self.settings.kind, 0
                    raise UserError(f"verifier.kind = {kind!r}: its worker does not start: {how}")
                reason = worker.error or f"the verifier's process died: {how}"
                batch.give_back(worker.calls, failed(reason))
            elif worker.calls and age > self.settings.timeout:
                self._remove(worker)
                detail = f"no verdict within {self.settings.timeout:g} s"
                batch.give_back(worker.calls, Verdict(0.0, Status.TIMEOUT, detail))
                self._report_slow(batch)

    def _report_slow(self, batch: _Batch) -> None:
        """Report a slow verifier, once: after the first timeout, or after a long batch."""
        if self._reported:
            return
        self._reported = True
        text = (
            f"the verifier is slow: {len(batch.verdicts)} of {len(batch.items)} replies have a "
            f"verdict after {time.monotonic() - batch.began:.1f} s (verifier.workers = "
            f"{self.settings.num_workers}, verifier.timeout = {self.settings.timeout:g} s)."
        )
        if batch.repeated:
            first = next(iter(batch.repeated.values())).detail
            text += f" Calls that end their process run once more in a new one (first: {first})."
        self.report(text)

    def _start_missing(self) -> None:
        """Start workers in the place of those that ended. UserError if the user's code was changed since
        the pool was made: the new workers would judge with other code than the old ones."""
        while len(self._workers) < self.settings.num_workers:
            if differ := self._code.items() ^ code_digests(self.settings).items():
                raise UserError(
                    f"{min(differ)[0]} was changed or deleted while the run uses it. Restore it and "
                    "resume the run, or accept the change with `hacrl resume RUN --accept-changed`"
                )
            self._workers.append(WorkerProcess(self.settings))

    def _remove(self, worker: WorkerProcess, dying: bool = False) -> str:
        self._workers.remove(worker)
        return worker.kill(dying)
