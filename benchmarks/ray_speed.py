"""Two agents side by side (ray) against in turn (local): seconds a step.

    python benchmarks/ray_speed.py                 # the pocket team, steps of about 10 seconds
    python benchmarks/ray_speed.py --agents wren,wren --seconds 5 --steps 4

Needs the extra hacrl[ray] and a machine with a free core for every agent. The number of problems is
chosen so that a step in one process takes `--seconds`; then both runtimes make the same run, with one
thread an agent, and the time from step to step is taken, the first one apart (it loads and warms up).
Their metrics must be equal, or nothing was compared.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.logs.observer import Quiet
from hacrl.runs import start
from hacrl.store.rundir import RunDirectory


class Stopwatch(Quiet):
    """Notes when each step was done."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.moments, self.moments[1:], strict=False)]


def config(agents: Sequence[str], prompts: int, steps: int, kind: str) -> dict[str, Any]:
    return {
        "steps": steps,
        "prompts_per_step": prompts,
        "samples_per_prompt": 8,
        "minibatch_samples": 8 * max(1, prompts // 2),
        "max_prompt_tokens": 64,
        "max_response_tokens": 32,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number", "workers": 1},
        "algorithm": {"name": "hacpo", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
        "evaluation": {"problems": 0},
        "checkpoint": {"save": False},
        "runtime": {"kind": kind, "threads": 1, "device": "cpu"},
        "log": {"tensorboard": False},
        "agents": [
            {"name": f"{name}-{i}", "model": f"pocket:{name}", "learning_rate": 1e-5}
            for i, name in enumerate(agents)
        ],
    }


def measure(settings: dict[str, Any], place: Path) -> tuple[list[float], RunDirectory]:
    watch = Stopwatch()
    run = start(settings, place, observer=watch)
    return watch.seconds(), run


def busy_by_agent(run: RunDirectory) -> dict[str, float]:
    """Seconds of each agent's phases in a step, the first step apart."""
    found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (step, agent, _), seconds in run.times().items():
        if step:
            found[agent][step] += seconds
    return {name: fmean(values.values()) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default="wren,finch", help="members of the pocket team")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a step in one process")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, help="problems a step, instead of finding them")
    args = parser.parse_args()
    agents = args.agents.split(",")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prompts = args.prompts
        if not prompts:
            (probe,), _ = measure(config(agents, 24, 2, "local"), place / "probe")
            prompts = max(2, round(24 * args.seconds / probe / 2) * 2)
        seconds, runs = {}, {}
        for kind in ("local", "ray"):
            settings = config(agents, prompts, args.steps + 1, kind)
            seconds[kind], runs[kind] = measure(settings, place / kind)
            each = ", ".join(f"{s:.2f}" for s in seconds[kind])
            shares = ", ".join(f"{n} {s:.2f}" for n, s in busy_by_agent(runs[kind]).items())
            print(f"{kind:5s} {fmean(seconds[kind]):6.2f} s a step ({each}); busy: {shares}")
        equal = len({run.metrics_path.read_bytes() for run in runs.values()}) == 1
    ratio = fmean(seconds["local"]) / fmean(seconds["ray"])
    print(f"{prompts} problems x 8 samples x {len(agents)} agents on {os.cpu_count()} cores")
    print(f"ray is {ratio:.2f} times as fast; metrics equal: {equal}")
    print(json.dumps({"seconds": seconds, "ratio": ratio, "equal": equal, "prompts": prompts}))
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
