"""HACPO's baseline with capabilities of the whole run and of each task, on single problems.

    python benchmarks/baseline_by_task.py RUN [RUN ...] --group 8

RUN is a finished or running team with more than `group` samples per prompt, e.g. gspo with 32. The first
`group` replies of every agent form the baselines of a problem; the learner's other replies are its
expected reward. Points of reward: the bias on the mean over problems with its standard error, and how
far the baseline is off on a single problem (docs/diagnostics.md, "The baselines").
"""

import argparse
from dataclasses import replace
from math import sqrt
from pathlib import Path

from hacrl.algorithms.capability import CapabilityHistory, CapabilitySettings
from hacrl.store.pool import Pool
from hacrl.store.reader import RunReader
from hacrl.study.diagnostics.baseline import Guess, baseline_metrics, guesses


def baselines(run: Path, learner: str, by: str, size: int) -> dict[str, float | None]:
    """`baseline_metrics` over all closed steps of a run."""
    reader = RunReader.open(run)
    pool = Pool(reader.pool_path, read_only=True)
    history = CapabilityHistory(pool.snapshot, CapabilitySettings(capability_by=by))  # type: ignore[arg-type]
    guessed: dict[str, dict[str, Guess]] = {}
    fresh: dict[str, list[float]] = {}
    members = [agent.name for agent in reader.config().agents]
    for step in range(reader.config().steps):
        if not pool.closed(step):
            break
        snapshot = pool.snapshot(step)
        capability = history.at(snapshot, members)
        for group in snapshot.groups:
            name = f"{step}/{group.problem_id}"
            first = tuple(t for t in group.judged if t.index < size)
            guessed[name] = guesses(replace(group, trajectories=first), capability, learner)
            fresh[name] = [t.reward for t in group.judged if t.agent == learner and t.index >= size]
    return baseline_metrics(guessed, fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--group", type=int, default=8)
    given = parser.parse_args()
    for run in given.runs:
        for agent in RunReader.open(run).config().agents:
            for by in ("run", "task"):
                found = baselines(run, agent.name, by, given.group)
                bias, error, spread = (
                    float(found[f"diagnostics/{key}/capability"] or 0.0)
                    for key in ("bias", "bias_se", "spread_squared")
                )
                off = 100 * sqrt(max(0.0, spread))
                text = (
                    f"{run.name} {agent.name} by {by}: bias {100 * bias:+.1f} +- {100 * error:.1f}"
                )
                print(f"{text}; off {off:.1f}")


if __name__ == "__main__":
    main()
