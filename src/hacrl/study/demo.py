"""`hacrl demo`: the pocket team together (hacpo) and the same agents alone (gspo), compared.

Both halves see the same problems and draw the same number of rollouts. With two cores or more they
run side by side, one thread each; else in turn. Everything lies in one folder:

    together/  alone/   two ordinary run directories
    alone.log           what the second process said
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hacrl.cli.progress import ProgressLine
from hacrl.config import Config, load_config
from hacrl.errors import UserError
from hacrl.runs import start
from hacrl.store.files import read_whole_lines, write_atomic
from hacrl.study.inspect.comparison import compare, comparison_table, sentence
from hacrl.study.pocket_config import POCKET_TOML
from hacrl.study.tables import console, duration
from hacrl.verify.settings import usable_cores


def run_demo(place: Path, changes: Sequence[str] = ()) -> None:
    """Train both halves under `place`, with `key=value` changes to the config of both, and print one
    table and one sentence."""
    out = console()
    if (place / "together").exists() or (place / "alone").exists():
        raise UserError(f"{place} holds a demo already; choose another directory with --run")
    path = place / "pocket.toml"
    write_atomic(path, POCKET_TOML)
    config = load_config(path, changes)
    begin = time.monotonic()
    if usable_cores() > 1:
        _side_by_side(place, path, config, changes)
    else:
        _in_turn(place, path, config, changes)
    seconds = time.monotonic() - begin
    rows = compare(place / "alone", place / "together")
    out.print(comparison_table(rows, config))
    out.print(f"\n{sentence(rows)}", soft_wrap=True)
    out.print(f"Training and evaluating both halves took {seconds:.0f} s ({duration(seconds)}).\n")


def free_place(path: Path) -> Path:
    """runs/demo, runs/demo-2, ..."""
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.name}-{n}")
    return candidate


def _in_turn(place: Path, path: Path, config: Config, changes: Sequence[str]) -> None:
    alone = load_config(path, [*changes, "algorithm.name=gspo"])
    for half, settings in (("together", config), ("alone", alone)):
        with ProgressLine() as progress:
            start(settings, place / half, observer=progress)


def _side_by_side(place: Path, path: Path, config: Config, changes: Sequence[str]) -> None:
    """`together` in this process, `alone` in a second one."""
    alone = place / "alone"
    command = [sys.executable, "-m", "hacrl", "train", str(path), *changes]
    command += ["algorithm.name=gspo", "--run", str(alone)]

    def beside() -> str:
        return f"alone: step {steps_done(alone)}"

    with (
        second_process(command, place / "alone.log") as other,
        ProgressLine(beside=beside) as progress,
    ):
        start(config, place / "together", observer=progress)
        _wait(other, alone, config.steps)
    if other.returncode:
        last = (read_whole_lines(place / "alone.log") or ["it said nothing"])[-1]
        raise UserError(f"the half alone failed: {last} (all of it: {place / 'alone.log'})")


@contextmanager
def second_process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that never outlives this block."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
            child.wait()


def _wait(other: subprocess.Popen[bytes], alone: Path, steps: int) -> None:
    screen = Console(stderr=True)
    if not screen.is_terminal:
        other.wait()
        return
    with screen.status("alone") as status:
        while other.poll() is None:
            status.update(f"alone: step {steps_done(alone)}/{steps}")
            time.sleep(0.2)


def steps_done(run: Path) -> int:
    """Read off the metrics of a run that another process writes."""
    lines = read_whole_lines(run / "metrics.jsonl")
    steps = [row["step"] + 1 for row in map(json.loads, lines) if row["kind"] == "train"]
    return max(steps, default=0)
