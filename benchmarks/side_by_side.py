"""Agents side by side against agents in turn: seconds per step of the same team.

    python benchmarks/side_by_side.py configs/pocket.toml prompts_per_step=96 minibatch_samples=384
    python benchmarks/side_by_side.py configs/real/arithmetic.toml --kinds local,processes,ray --steps 6

Every runtime makes the same run, without evaluations and checkpoints. The time from step to step is
measured, without the first step, which loads and warms up. `own step` is the time of an agent's phases
in the run in turn, so the largest one is the least that a step of the team can take. On a CPU the
metrics of all runs must be equal. On a GPU, start the multi-process service first
(nvidia-cuda-mps-control -d).
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hacrl.config import load_config
from hacrl.logs.observer import Observer
from hacrl.runs import start
from hacrl.store.rundir import RunDirectory

COMMON = ["evaluation.problems=0", "checkpoint.save=false", "log.tensorboard=false"]


class Stopwatch(Observer):
    """Records when each step was finished."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.moments.append(time.perf_counter())


def own_steps(run: RunDirectory) -> dict[str, float]:
    """Median seconds of each agent's phases in a step, without the first step."""
    found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (step, agent, _), seconds in run.times().items():
        if step:
            found[agent][step] += seconds
    return {name: median(values.values()) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="dotted.key=value, as for hacrl train")
    parser.add_argument("--kinds", default="local,processes", help="runtimes to compare")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_intermixed_args()
    config, seconds, own, metrics = load_config(args.config), {}, {}, set()
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds.split(","):
            watch = Stopwatch()
            settings = [*COMMON, f"steps={args.steps + 1}", f"runtime.kind={kind}", *args.overrides]
            run = start(config, Path(folder) / kind, settings, observer=watch)
            each = [b - a for a, b in zip(watch.moments, watch.moments[1:], strict=False)]
            seconds[kind], own[kind] = each, own_steps(run)
            metrics.add(run.metrics_path.read_bytes())
            agents = ", ".join(f"{n} {s:.2f}" for n, s in own[kind].items())
            print(f"{kind:9s} {median(each):7.2f} s per step; own steps: {agents}", flush=True)
    steps = {kind: median(each) for kind, each in seconds.items()}
    first = args.kinds.split(",")[0]
    slowest = max(own[first].values())
    for kind, value in steps.items():
        print(
            f"{kind}: {value / steps[first]:.2f} of {first}, {value / slowest:.2f} of the slowest "
            "agent's own step"
        )
    equal = len(metrics) == 1
    print(f"metrics equal: {equal} ({os.cpu_count()} cores)")
    if args.out:
        figures = {"seconds": seconds, "own": own, "equal": equal, "overrides": args.overrides}
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
