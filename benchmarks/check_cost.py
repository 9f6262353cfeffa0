"""CPU time that the checks of a pocket run take.

    python benchmarks/check_cost.py

The checks are fingerprints, watches, checks of peers' rows, check values of JSON files and digests of
checkpoints. Each is timed where it is called, and its CPU seconds are divided by those of the whole run
with its workers, without imports. Whole runs with and without the checks are not compared: the CPU times
of equal runs differ by several percent.
"""

import argparse
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hacrl.runs
import hacrl.store.checkpoint
import hacrl.store.rows
import hacrl.trust.validate
from hacrl.config import load_config

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "pocket.toml"
seconds: Counter[str] = Counter()
calls: Counter[str] = Counter()
depth = 0  # a check inside another one is part of that one


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        global depth
        depth += 1
        began = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                seconds[name] += time.thread_time() - began
                calls[name] += 1

    return measured


def timed_watch(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(run: Any) -> Any:
        watch = make(run)
        watch.look = timed("watches", watch.look)
        return watch

    return made


def cpu_seconds() -> float:
    """User and system time of this process and of the workers that have ended."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    checker, rows = hacrl.trust.validate.Checker, hacrl.store.rows
    hacrl.runs.check_inputs = timed("fingerprints", hacrl.runs.check_inputs)
    hacrl.runs.WATCHES = tuple(map(timed_watch, hacrl.runs.WATCHES))
    checker.check = timed("peers' rows", checker.check)  # type: ignore[method-assign]
    rows._closed = timed("check values", rows._closed)
    hacrl.store.checkpoint.sha256 = timed("digests", hacrl.store.checkpoint.sha256)
    began = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        hacrl.runs.start(load_config(CONFIG), Path(folder) / "run", [f"steps={args.steps}"])
    whole = cpu_seconds() - began
    for name, used in seconds.most_common():
        print(f"{name:12s} {used:7.3f} s in {calls[name]:6,} calls: {used / whole:.2%}")
    print(f"all checks: {sum(seconds.values()) / whole:.2%} of {whole:.1f} CPU seconds")


if __name__ == "__main__":
    main()
