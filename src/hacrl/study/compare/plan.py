"""`hacrl compare SUITE --plan`: runs, rollouts, memory and GPU hours, before anything starts.

GPU hours are those of one H200. A rollout of L tokens with a model of P billion parameters takes
L (53 + 12 P) microseconds with scoring, and a learner needs L (30 + 14 P) for each sample it learns
from. Both lines go through the phases of one step of Qwen3-1.7B + Qwen3-4B (benchmarks/README.md, "Two
agents together"); other sizes are extrapolated. L is REPLY_TOKENS, or the limit if that is smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.table

from hacrl.algorithms import make_algorithm
from hacrl.config import Config
from hacrl.study.compare.finished import FinishedRuns
from hacrl.study.compare.suite import Run, Suite, load_suite, make_runs
from hacrl.study.doctor.doctor import agent_need, memory_findings
from hacrl.study.doctor.memory import named_parameters
from hacrl.study.tables import plain_table
from hacrl.tasks.fetch import SOURCES

REPLY_TOKENS = 700  # mean length of a reply to a MATH problem: that of the measured step


@dataclass(frozen=True)
class PlanRow:
    """All runs of one team under one arm.

    Example: PlanRow("pair", "hacpo", runs=1, steps=58, rollouts=118784,
             memory="131 GB", hours=5.2)
    """

    team: str
    arm: str
    runs: int
    steps: int
    rollouts: int  # of all agents and runs, without evaluation
    memory: str
    hours: float | None  # None if the size of a model is unknown


def make_plan(
    path: Path,
    out: Path,
    changes: Sequence[str] = (),
    only: Sequence[str] = (),
    kept: Path | None = None,
    teams: Sequence[str] = (),
) -> list[PlanRow]:
    """One row per team and arm, of the runs that `compare` with the same arguments would train."""
    suite = load_suite(path, changes)
    runs = FinishedRuns(kept).with_results(make_runs(suite, out, changes))
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in suite.wanted(runs, only, teams):
        if not run.finished:
            groups.setdefault((run.team, run.arm), []).append(run)
    return [_row(suite, *names, same) for names, same in groups.items()]


def _row(suite: Suite, team: str, arm: str, runs: Sequence[Run]) -> PlanRow:
    config, count = runs[0].config, len(runs)
    seconds = run_seconds(suite, config)
    drawn = sum(config.samples_of(a) for a in config.agents if not a.replay)
    rollouts = drawn * config.prompts_per_step
    memory = [finding.detail.partition(",")[0] for finding in memory_findings(config)]
    return PlanRow(
        team,
        arm,
        count,
        config.steps,
        count * config.steps * rollouts,
        "; ".join(memory) or "unknown: no model folder here",
        None if seconds is None else count * seconds / 3600,
    )


def run_seconds(suite: Suite, config: Config) -> float | None:
    """Estimated seconds of one run on one H200 (see above), with evaluation and benchmarks; None if the
    size of a model is unknown."""
    samples = {a.name: config.prompts_per_step * config.samples_of(a) for a in config.agents}
    shares = make_algorithm(config.algorithm, (0.0, 1.0)).needs.include("text")
    every = config.evaluation.every
    evaluations = 1 + (config.steps // every if every else 1)
    # With evaluation.problems = "all" the size is not known here.
    held_out = config.evaluation.most or SOURCES["math500"].rows
    asked = evaluations * held_out * config.evaluation.samples
    if settings := suite.benchmarks:
        for b in settings.chosen:
            problems = min(settings.problems or SOURCES[b.name].rows, SOURCES[b.name].rows)
            asked += problems * settings.samples.get(b.name, b.samples)
    total = 0.0
    for agent in (a for a in config.agents if not a.replay):
        need = agent_need(config, agent)  # None if the model folder is not here
        size = need.parameters if need else named_parameters(agent.model or "")
        if size is None:
            return None
        tokens = min(REPLY_TOKENS, config.response_limit(agent))
        learned = sum(samples.values()) if shares else samples[agent.name]
        billions, replies = size / 1e9, config.steps * samples[agent.name] + asked
        total += replies * tokens * (53 + 12 * billions) * 1e-6
        if agent.learns:
            total += config.steps * learned * tokens * (30 + 14 * billions) * 1e-6
    return total


def plan_table(rows: Sequence[PlanRow]) -> rich.table.Table:
    """The plan for the terminal, with a line of totals."""
    caption = (
        "Nothing was started.\n"
        f"GPU hours: estimate for one H200 and replies of {REPLY_TOKENS} tokens (or the limit), see\n"
        "study/compare/plan.py."
    )
    columns = ("runs", "steps", "rollouts", "GPU hours", "device memory")
    table = plain_table("\nplan", ["team", "arm"], columns, caption)
    for row in rows:
        hours = "unknown" if row.hours is None else f"{row.hours:.2g}"
        numbers = (f"{n:,}" for n in (row.runs, row.steps, row.rollouts))
        table.add_row(row.team, row.arm, *numbers, hours, row.memory)
    runs, rollouts = sum(row.runs for row in rows), sum(row.rollouts for row in rows)
    known = [row.hours for row in rows if row.hours is not None]
    hours = f"{'> ' * (len(known) < len(rows))}{sum(known):.3g}" if known or not rows else "unknown"
    table.add_row("all", "", f"{runs:,}", "", f"{rollouts:,}", hours, "")
    return table
