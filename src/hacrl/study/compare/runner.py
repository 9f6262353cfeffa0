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
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hacrl.config import dump_config
from hacrl.errors import Terminated, UserError
from hacrl.plain_console import PlainConsole
from hacrl.safe_text import plural
from hacrl.stopping import check, stoppable
from hacrl.store.files import write_config
from hacrl.study.compare.suite import Run
from hacrl.verify.settings import CORES, usable_cores

READ_EVERY = 2.0  # seconds between two readings of the runs' metrics
POLL_EVERY = 0.2  # seconds between two checks of the training processes
_NUMBER = re.compile(r"(?<![\w.'-])\d+(?![\w-])")  # not one in the name of an agent, as in llama-3b
Failed = tuple[str, str, Path]  # name of the run, what happened, the log file


def train_runs(
    runs: Sequence[Run],
    parallel: int,
    on_finish: Callable[[Run], None] = lambda run: None,
    suite: Sequence[Run] = (),
) -> list[Failed]:
    """Train the unfinished runs, at most `parallel` at a time; return the failed ones. `on_finish` is
    called with every run that ends well. A failure does not stop the others. A run that replays another
    run of `suite` starts after it, and fails if that one is not trained to its end."""
    waiting = [run for run in runs if not run.finished]
    active: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}
    failed: list[Failed] = []
    with stoppable(), SuiteProgress(runs, waiting, parallel) as progress:
        try:
            while waiting or active:
                for run, process in list(active.values()):
                    if process.poll() is not None:
                        del active[run.name]
                        failed += _ended(run, process.returncode, progress, on_finish)
                trained = [run for run, _ in active.values()]
                unfinished = {r.folder.resolve() for r in (*waiting, *trained)}
                for run in list(waiting):
                    if len(active) < parallel and not run.replayed & unfinished:
                        if lost := [r for r in suite if _replays(run, r) and not r.finished]:
                            text = f"it replays {lost[0].name}, which is not finished; train that first"
                            failed.append(_fail(run, text, lost[0], progress))
                        elif started := _start(run, parallel):
                            active[run.name] = run, started
                            progress.print(f"started: {run.name}")
                        elif not run.finished:
                            continue  # another process trains it: check again later
                        waiting.remove(run)
                progress.update(trained)
                time.sleep(POLL_EVERY)
                check()
        except (KeyboardInterrupt, Terminated):
            progress.interrupted()
            raise
        finally:
            for _, process in active.values():
                process.terminate()
            for _, process in active.values():
                process.wait()
    return failed


def _ended(
    run: Run, code: int, progress: SuiteProgress, on_finish: Callable[[Run], None]
) -> list[Failed]:
    if code == 0 and run.finished:
        on_finish(run)
        progress.finished(run)
        return []
    log = run.folder.with_suffix(".log")
    last = (log.read_text(errors="replace").splitlines() or ["(the log is empty)"])[-1]
    if code == -signal.SIGKILL:
        last = f"killed (by the system if memory ran out); last line: {last}"
    return [_fail(run, last, run, progress)]


def _fail(run: Run, text: str, cause: Run, progress: SuiteProgress) -> Failed:
    """Show that a run failed; `cause` is the run whose log says why."""
    progress.print(f"failed: {run.name}: {text}")
    return run.name, text, cause.folder.with_suffix(".log")


def _replays(run: Run, other: Run) -> bool:
    return other.folder.resolve() in run.replayed


def _start(run: Run, parallel: int) -> subprocess.Popen[bytes] | None:
    """Start a run's process; None if another process trains it or has just finished it."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(run.folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if run.finished:
            return None
        with open(run.folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "hacrl", *_command(run)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=run_environment(parallel),
                pass_fds=(lock,),
            )
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
        self.runs, self._finished = runs, len(runs) - len(waiting)
        self._done = {run.name: _rollouts(run, run.reader.steps_done()) for run in waiting}
        self._last_read = 0.0
        self._noted: set[str] = set()
        columns = (TextColumn("{task.description}"), BarColumn(30), TimeRemainingColumn())
        self._bar = Progress(
            *columns, console=self.console, transient=True, speed_estimate_period=3600
        )
        total = sum(_rollouts(run, run.config.steps) for run in waiting)
        self._task = self._bar.add_task("", total=total, completed=sum(self._done.values()))
        before = f", {self._finished} already finished" if self._finished else ""
        self.print(f"{plural(len(runs), 'run')}{before}; {parallel} at a time")

    def __enter__(self) -> SuiteProgress:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def finished(self, run: Run) -> None:
        self._finished += 1
        self.print(f"finished: {run.name}; {self._finished} of {len(self.runs)} runs")
        with suppress(UserError):  # a damaged file of notes
            for row in run.reader.notes():
                kind = _NUMBER.sub("0", row["text"])  # with other numbers it is the same kind
                if kind not in self._noted:
                    self.print(f"note of {run.name}: {' '.join(row['text'].split())}")
                self._noted.add(kind)

    def interrupted(self) -> None:
        report = "; --report builds the report from the finished runs" if self._finished else ""
        self.print(
            f"{self._finished} of {len(self.runs)} runs are finished. The same command continues"
            f"{report}"
        )

    def update(self, active: Sequence[Run]) -> None:
        """Read how far the active runs are and show it in a terminal."""
        if self.console.is_terminal and time.monotonic() - self._last_read >= READ_EVERY:
            self._last_read = time.monotonic()
            self._done |= {r.name: _rollouts(r, r.reader.steps_done()) for r in active}
            text = f"{self._finished} of {len(self.runs)} runs"
            self._bar.update(self._task, completed=sum(self._done.values()), description=text)


def _rollouts(run: Run, steps: int) -> int:
    """Number of rollouts that all agents draw in `steps` steps."""
    config = run.config
    return steps * config.prompts_per_step * sum(config.samples_of(a) for a in config.agents)
