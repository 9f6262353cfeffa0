"""Train the runs of a suite that are not finished, several at a time, each in its own process.

A finished run is left alone. An interrupted run continues from its journal and checkpoints with
`hacrl resume`; a run that has nothing to continue from starts with `hacrl train`.

The training process of a run inherits a file lock and holds it until it ends. If `compare` is killed,
its runs therefore finish undisturbed: the next `compare` waits for the locks.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.config import dump_config
from hacrl.errors import EXIT_OUT_OF_MEMORY, Terminated
from hacrl.stopping import check, stoppable
from hacrl.store.files import read_whole_lines, write_config
from hacrl.study.compare.progress import SuiteProgress
from hacrl.study.compare.suite import Run
from hacrl.verify.settings import CORES, usable_cores

POLL_EVERY = 0.2  # seconds between two checks of the training processes
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
    memory beside others is retried later, and from then on fewer runs train at a time."""
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
                locked = 0
                for run in list(waiting):
                    if len(active) >= slots:
                        break
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
        progress.finished(run)
        on_finish(run)
        return []
    last = (read_whole_lines(log) or ["(the log is empty)"])[-1]
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
