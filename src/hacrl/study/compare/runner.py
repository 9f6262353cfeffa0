"""Train the runs of a suite that are not finished, several at a time, each in its own process.

A finished run is left alone. An interrupted run continues from its journal and checkpoints with
`hacrl resume`; a run that has nothing to continue from starts with `hacrl train`.

The training process of a run inherits a file lock and holds it until it ends. If `compare` is killed,
its runs therefore continue to the end, and the next `compare` waits for their locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from hacrl.config import dump_config
from hacrl.errors import EXIT_OUT_OF_MEMORY, Terminated, UserError
from hacrl.plain_console import PlainConsole
from hacrl.safe_text import plural
from hacrl.stopping import check, stoppable
from hacrl.store.files import write_config
from hacrl.study.compare.suite import Run
from hacrl.verify.settings import CORES, usable_cores

LINE_EVERY = 30.0  # seconds between two lines of progress outside a terminal
READ_EVERY = 2.0  # seconds between two readings of the runs' metrics
POLL_EVERY = 0.2  # seconds between two checks of the training processes
_NUMBER = re.compile(r"(?<![\w.'-])\d+(?![\w-])")  # not one in the name of an agent, as in llama-3b
_NO_MEMORY = {EXIT_OUT_OF_MEMORY: "out of memory", -signal.SIGKILL: "killed"}
"""Exit codes of a run without memory: it reports so itself, or the system kills it."""

Failed = tuple[str, str, Path]  # name of the run, the last line of its log, the log file


@dataclass
class Process:
    """The training process of one run."""

    run: Run
    popen: subprocess.Popen[bytes]
    shared: bool = False  # whether another run was training at the same time


def train_runs(
    runs: Sequence[Run], parallel: int, on_finish: Callable[[Run], None] = lambda run: None
) -> list[Failed]:
    """Train the unfinished runs, at most `parallel` at a time; return the failed ones. `on_finish` is
    called with every run that ends well. A failure does not stop the others. A run that runs out of
    memory while others train is retried later, and from then on fewer runs train at a time. A run that
    replays another one starts after it."""
    waiting = [run for run in runs if not run.finished]
    active: list[Process] = []
    failed: list[Failed] = []
    slots = parallel
    with stoppable(), SuiteProgress(runs, waiting, parallel) as progress:
        try:
            while waiting or active:
                for process in [p for p in active if p.popen.poll() is not None]:
                    active.remove(process)
                    code = process.popen.returncode
                    if process.shared and code in _NO_MEMORY:
                        slots = max(1, len(active) or slots - 1)
                        waiting.insert(0, process.run)
                        progress.postponed(process.run, _NO_MEMORY[code], slots)
                    else:
                        failed += _ended(process, progress, on_finish)
                unfinished = {r.folder.resolve() for r in (*waiting, *(p.run for p in active))}
                locked = 0
                for run in list(waiting):
                    if len(active) >= slots:
                        break
                    if run.replayed & unfinished:
                        continue
                    if started := _start(run, parallel):
                        active.append(started)
                        progress.started(run)
                    elif not run.finished:
                        locked += 1  # another process trains it: check again later
                        continue
                    waiting.remove(run)
                if len(active) + locked > 1:
                    for process in active:
                        process.shared = True
                progress.update([process.run for process in active])
                time.sleep(POLL_EVERY)
                check()
        except (KeyboardInterrupt, Terminated):
            progress.interrupted()
            raise
        finally:
            for process in active:
                process.popen.terminate()
            for process in active:
                process.popen.wait()
    return failed


def _ended(
    process: Process, progress: SuiteProgress, on_finish: Callable[[Run], None]
) -> list[Failed]:
    run, log = process.run, process.run.folder.with_suffix(".log")
    if process.popen.returncode == 0 and run.finished:
        on_finish(run)
        progress.finished(run)
        return []
    last = (log.read_text(errors="replace").splitlines() or ["(the log is empty)"])[-1]
    if process.popen.returncode == -signal.SIGKILL:
        last = f"killed (by the system if memory ran out); last line: {last}"
    progress.failed(run, last)
    return [(run.name, last, log)]


def _start(run: Run, parallel: int) -> Process | None:
    """Start a run's process; None if another process trains it or has just finished it."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(run.folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if run.finished:
            return None
        with open(run.folder.with_suffix(".log"), "ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "hacrl", *_command(run)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=run_environment(parallel),
                pass_fds=(lock,),
            )
        return Process(run, popen)
    except BlockingIOError:
        return None
    finally:
        os.close(lock)  # the child keeps its own descriptor of the lock


def run_environment(parallel: int) -> dict[str, str]:
    """Environment of one of `parallel` processes: the cores are divided equally between them, for
    threads and for verifier workers."""
    cores = str(max(1, usable_cores() // parallel))
    return {"OMP_NUM_THREADS": cores, **os.environ, CORES: cores}


def _command(run: Run) -> list[str]:
    if run.reader.config_path.is_file():
        return ["resume", str(run.folder)]
    path = run.folder.with_suffix(".toml")
    write_config(path, dump_config(run.config))
    return ["train", str(path), "--run", str(run.folder)]


class SuiteProgress:
    """Progress with the time left: a bar in a terminal, lines elsewhere. Work is measured in rollouts,
    which take most of the time and differ between arms. Notes of the runs are shown once per kind."""

    def __init__(self, runs: Sequence[Run], waiting: Sequence[Run], parallel: int) -> None:
        self.console = PlainConsole(stderr=True)
        self.runs, self.parallel = runs, parallel
        self._finished = len(runs) - len(waiting)
        self._total = {run.name: _rollouts(run) * run.config.steps for run in waiting}
        self._before = {run.name: _rollouts(run) * run.reader.steps_done() for run in waiting}
        self._done = dict(self._before)
        self._start = self._last_line = time.monotonic()
        self._last_read = 0.0
        self._noted: set[str] = set()
        columns = (TextColumn("{task.description}"), BarColumn(30))
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=max(1, sum(self._total.values())))

    def __enter__(self) -> SuiteProgress:
        before = f", {self._finished} already finished" if self._finished else ""
        self._print(f"{plural(len(self.runs), 'run')}{before}; {self.parallel} at a time")
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, run: Run) -> None:
        self._print(f"started: {run.name}")

    def finished(self, run: Run) -> None:
        self._finished += 1
        self._done[run.name] = self._total[run.name]
        self._print(f"finished: {run.name}; {self._state()}")
        with suppress(UserError):  # a damaged file of notes
            for row in run.reader.notes():
                kind = _NUMBER.sub("0", row["text"])  # with other numbers it is the same kind
                if kind not in self._noted:
                    self._print(f"note of {run.name}: {' '.join(row['text'].split())}")
                self._noted.add(kind)

    def failed(self, run: Run, last: str) -> None:
        for counts in (self._total, self._before, self._done):
            counts.pop(run.name)
        self._print(f"failed: {run.name}: {last}")

    def postponed(self, run: Run, reason: str, slots: int) -> None:
        limit = "one run at a time" if slots == 1 else f"at most {slots} runs at a time"
        self._print(f"{reason}: {run.name}. It continues later; from now on {limit}")

    def interrupted(self) -> None:
        report = "; --report builds the report from the finished runs" if self._finished else ""
        self._print(
            f"{self._finished} of {len(self.runs)} runs are finished. The same command continues"
            f"{report}"
        )

    def update(self, active: Sequence[Run]) -> None:
        """Read how far the active runs are and show it."""
        now = time.monotonic()
        if now - self._last_read < READ_EVERY:
            return
        self._last_read = now
        for run in active:
            self._done[run.name] = _rollouts(run) * run.reader.steps_done()
        done, total = sum(self._done.values()), max(1, sum(self._total.values()))
        self._bar.update(self._task, completed=done, total=total, description=self._state())
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY:
            self._print(self._state())

    def _state(self) -> str:
        return f"{self._finished} of {len(self.runs)} runs, {self._time_left()}"

    def _time_left(self) -> str:
        """Estimated from the work of this process only."""
        done = sum(self._done.values()) - sum(self._before.values())
        left = sum(self._total.values()) - sum(self._done.values())
        passed = time.monotonic() - self._start
        if done <= 0 or left <= 0:
            return f"{timedelta(seconds=round(passed))} passed"
        return f"{timedelta(seconds=round(passed / done * left))} left"

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, soft_wrap=True)


def _rollouts(run: Run) -> int:
    """Rollouts of all agents in one step."""
    config = run.config
    return config.prompts_per_step * sum(config.samples_of(a) for a in config.agents)
