"""A team together, each agent alone, and alone with twice the rollouts: several seeds at a time.

python benchmarks/real_team.py configs/real/arithmetic.toml --out runs/real --seeds 1 2 3 --at-once 9

Every run is an ordinary `hacrl train`; further `key=value` arguments go to all of them. The table
gives held-out accuracy before and after, each a mean over seeds with its 95 percent interval (t
distribution over seeds), and the difference of the team to the other arms, paired by seed and agent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

from hacrl.evaluate import read_scores
from hacrl.rundir import RunDirectory

ARMS = {
    "hacpo": [],
    "gspo": ["algorithm.name=gspo"],
    "gspo_x2": ["algorithm.name=gspo", "samples_per_prompt=16"],
    "naive": ["algorithm.name=naive"],
}
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Of the t distribution, by the number of seeds."""


def run_all(jobs: list[tuple[Path, list[str]]], at_once: int) -> None:
    """Start at most `at_once` runs side by side; a failed one is told and does not stop the rest."""
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    waiting = list(jobs)
    while waiting or running:
        while waiting and len(running) < at_once:
            run, command = waiting.pop(0)
            run.parent.mkdir(parents=True, exist_ok=True)
            log = open(f"{run}.log", "wb")  # noqa: SIM115
            running.append((run, subprocess.Popen(command, stdout=log, stderr=log)))
        for run, process in list(running):
            if process.poll() is not None:
                running.remove((run, process))
                if process.returncode:
                    print(f"{run}: exit code {process.returncode}, see {run}.log", flush=True)
        time.sleep(0.5)


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{100 * values[0]:.1f}"
    half = T95[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{100 * fmean(values):.1f} ± {100 * half:.1f}"


def accuracy(run: RunDirectory, step: int, agent: str) -> float:
    return fmean(read_scores(run.evaluation(step, agent)).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=["hacpo", "gspo", "gspo_x2"], choices=ARMS)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    jobs = []
    for arm in sorted(options.arms, key=lambda a: "x2" not in a):  # the long ones first
        for seed in options.seeds:
            run = options.out / f"{arm}-{seed}"
            command = [
                sys.executable,
                "-m",
                "hacrl",
                "train",
                str(options.config),
                "--run",
                str(run),
            ]
            changes = [f"seed={seed}", "checkpoint.save=false", "log.tensorboard=false"]
            jobs.append((run, [*command, *changes, *ARMS[arm], *options.overrides]))
    start = time.time()
    run_all(jobs, options.at_once)
    print(f"{len(jobs)} runs in {time.time() - start:.0f} s, {options.at_once} at once\n")
    report(options.out, options.arms, options.seeds)


def report(out: Path, arms: list[str], seeds: list[int]) -> None:
    results: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    steps, agents, rollouts = 0, [], {}
    for arm in arms:
        for seed in seeds:
            run = RunDirectory(out / f"{arm}-{seed}")
            if not run.config_path.exists():
                continue
            config = run.config()
            steps, agents = config.steps, [a.name for a in config.agents if a.learns]
            rollouts[arm] = steps * config.prompts_per_step * config.samples_per_prompt
            for agent in agents:
                if (run.evaluation(steps, agent) / "result.json").exists():
                    scores = accuracy(run, 0, agent), accuracy(run, steps, agent)
                    results.setdefault((arm, agent), []).append((seed, *scores))
    print("| agent | arm | rollouts | seeds | before | after | gain | hacpo minus this arm |")
    print("|---|---|---|---|---|---|---|---|")
    for agent in agents:
        for arm in arms:
            rows = results.get((arm, agent), [])
            if not rows:
                continue
            team = {seed: after for seed, _, after in results.get(("hacpo", agent), [])}
            pairs = [team[seed] - after for seed, _, after in rows if seed in team]
            print(
                f"| {agent} | {arm} | {rollouts[arm]:,} | {len(rows)} "
                f"| {interval([b for _, b, _ in rows])} | {interval([a for _, _, a in rows])} "
                f"| {interval([a - b for _, b, a in rows])} "
                f"| {interval(pairs) if arm != 'hacpo' and pairs else ''} |"
            )
    (out / "results.json").write_text(
        json.dumps({f"{arm}/{agent}": rows for (arm, agent), rows in results.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
