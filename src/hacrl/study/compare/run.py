"""Running the cells that are missing, several side by side, each in a process of its own.

A finished cell is left alone. An unfinished one goes on from its journal and checkpoints with
`hacrl resume`; where there is nothing to go on from, it begins with `hacrl train`.

Each cell has a lock that its process inherits and holds while it lives. So a `compare` that was
killed leaves runs that finish in peace: the next one waits for them and never writes beside them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.config import dump_config
from hacrl.errors import EXIT_OUT_OF_MEMORY
from hacrl.store.files import read_whole_lines, write_atomic
from hacrl.study.compare.progress import SuiteProgress
from hacrl.study.compare.suite import Cell
from hacrl.verify.settings import CORES, usable_cores

LOOK_EVERY = 0.2
"""Seconds between two looks at the running cells."""
_NO_MEMORY = {EXIT_OUT_OF_MEMORY: "out of memory", -signal.SIGKILL: "killed"}
"""How a cell ends that has no memory left: it says so, or the system kills it."""

Failed = tuple[str, str, Path]
"""Name of the cell, the last line it said, its log."""


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    shared: bool = False
    """Whether another cell ran beside it at any time."""


def run_cells(cells: Sequence[Cell], parallel: int) -> list[Failed]:
    """Run what is not finished, at most `parallel` at a time. A cell that fails does not stop the
    others. One that runs out of memory beside others goes on later, and fewer run side by side."""
    waiting = [cell for cell in cells if not cell.finished]
    running: list[_Running] = []
    failed: list[Failed] = []
    room = parallel
    with SuiteProgress(cells, waiting, parallel) as progress:
        try:
            while waiting or running:
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    if job.shared and job.process.returncode in _NO_MEMORY:
                        room = max(1, len(running) or room - 1)  # those that are left have enough
                        waiting.insert(0, job.cell)
                        progress.postponed(job.cell, _NO_MEMORY[job.process.returncode], room)
                    else:
                        failed += _ended(job, progress)
                held = 0
                for cell in list(waiting):
                    if len(running) >= room:
                        break
                    if begun := _start(cell, parallel):
                        running.append(begun)
                        progress.started(cell)
                    elif not cell.finished:
                        held += 1  # by another process: ask again later
                        continue
                    waiting.remove(cell)
                if len(running) + held > 1:
                    for job in running:
                        job.shared = True
                progress.look([job.cell for job in running])
                time.sleep(LOOK_EVERY)
        except KeyboardInterrupt:
            progress.interrupted()
            raise
        finally:  # stopped: no child outlives this, unless it is killed outright
            for job in running:
                job.process.terminate()
            for job in running:
                job.process.wait()
    return failed


def _ended(job: _Running, progress: SuiteProgress) -> list[Failed]:
    cell, log = job.cell, job.cell.folder.with_suffix(".log")
    if job.process.returncode == 0 and cell.finished:
        progress.finished(cell)
        return []
    last = (read_whole_lines(log) or ["it said nothing"])[-1]
    if job.process.returncode == -signal.SIGKILL:
        last = f"killed, by the system if memory ran short; before that: {last}"
    progress.failed(cell, last)
    return [(cell.name, last, log)]


def _start(cell: Cell, parallel: int) -> _Running | None:
    """None if another process works on the cell, or has just finished it."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(cell.folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if cell.finished:
            return None
        with open(cell.folder.with_suffix(".log"), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hacrl", *_command(cell)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=cell_environment(parallel),
                pass_fds=(lock,),
            )
        return _Running(cell, process)
    except BlockingIOError:
        return None
    finally:
        os.close(lock)  # the child has its own handle of the same lock


def cell_environment(parallel: int) -> dict[str, str]:
    """Each of so many cells side by side has its share of the cores, for threads and for verifiers."""
    share = str(max(1, usable_cores() // parallel))
    return {"OMP_NUM_THREADS": share, **os.environ, CORES: share}


def _command(cell: Cell) -> list[str]:
    if cell.run.config_path.is_file():
        return ["resume", str(cell.folder)]
    path = cell.folder.with_suffix(".toml")
    write_atomic(path, dump_config(cell.config))
    return ["train", str(path), "--run", str(cell.folder)]
