"""Benchmarks at the end of every run of a suite, in the form of the paper's Table 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from hacrl.config_file import first_difference
from hacrl.errors import UserError
from hacrl.statistics import Estimate, t_interval
from hacrl.study.benchmarks.catalogue import load_problems
from hacrl.study.compare.suite import Run, Suite, SuiteBenchmarks

if TYPE_CHECKING:
    from hacrl.study.benchmarks.results import BenchmarkResult
    from hacrl.study.compare.reading import AgentRun

FOLDER = "benchmarks"  # RUN/benchmarks, as for `hacrl eval RUN --benchmarks`
OF_RUN = {"model", "step", "system", "template", "template_args", "reply_start"}
"""Settings of a result that belong to the evaluated run. The others must be equal in all runs."""


@dataclass(frozen=True)
class BenchmarkRow:
    """One agent under one arm: mean over seeds of each benchmark's figure.

    Example: BenchmarkRow("pair", "wren", "hacpo", {"aime25": Estimate(0.1, ...)}, mean=0.1,
             published={"aime25": 13.3})
    """

    team: str
    agent: str
    arm: str
    scores: Mapping[str, Estimate]
    mean: float  # every benchmark counts once
    published: Mapping[str, float]  # the paper's figures in percent; "mean" is its printed average


def check_data(settings: SuiteBenchmarks) -> None:
    """Raise a UserError if a data file is missing or broken, before anything is trained."""
    for benchmark in settings.chosen:
        load_problems(benchmark, settings.data, settings.prompt)


def evaluate_runs(
    settings: SuiteBenchmarks, runs: Sequence[Run], report: Callable[[str], None]
) -> None:
    """Evaluate the agents of every finished run whose directory is here; finished benchmarks are not run
    again."""
    from hacrl.study.benchmarks.run import evaluate_benchmarks
    from hacrl.study.evaluation import find_candidates

    for run in runs:
        if run.finished and not run.reader.config_path.is_file():
            report(f"benchmarks: {run.name} is left out: only its line in --kept FILE is here")
        elif run.finished:
            report(f"benchmarks: {run.name}")
            found = [find_candidates(str(run.folder), agent=agent)[0] for agent in run.learners]
            out = run.folder / FOLDER
            evaluate_benchmarks(found, settings.chosen, settings.data, out, settings)


def benchmark_rows(suite: Suite, agent_runs: Sequence[AgentRun]) -> Iterator[BenchmarkRow]:
    """One row per team, agent and arm, from the runs whose benchmarks are finished."""
    if suite.benchmarks is None:
        return
    names = [b.name for b in suite.benchmarks.chosen]
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    first: dict[str, BenchmarkResult] = {}
    for run, agent in [(r.run, r.agent) for r in agent_runs]:
        if results := _results(run, agent, names):
            for name, result in results.items():
                _check_settings(first.setdefault(name, result), result, f"{run.name}/{agent}")
            scores = {name: result.score.mean for name, result in results.items()}
            found.setdefault((run.team, agent, run.arm), []).append(scores)
    agents, arms = list(dict.fromkeys(key[:2] for key in found)), [arm.name for arm in suite.arms]
    for team, agent, arm in sorted(found, key=lambda k: (agents.index(k[:2]), arms.index(k[2]))):
        seeds = found[team, agent, arm]
        means = {name: t_interval([values[name] for values in seeds]) for name in names}
        paper = suite.published.get(team, {}).get(agent, {}).get(arm, {})
        mean = fmean(e.mean for e in means.values())
        yield BenchmarkRow(team, agent, arm, means, mean, paper)


def _results(run: Run, agent: str, names: Sequence[str]) -> dict[str, BenchmarkResult]:
    """The result of every benchmark by name; empty if one is not finished."""
    from hacrl.study.benchmarks.results import read_result

    folders = {name: run.folder / FOLDER / name / agent for name in names}
    if not all((folder / "result.json").is_file() for folder in folders.values()):
        return {}
    return {name: read_result(folder) for name, folder in folders.items()}


def _check_settings(first: BenchmarkResult, other: BenchmarkResult, where: str) -> None:
    """UserError if two results of a benchmark were made with other problems, limits or verifiers."""
    one, two = (
        {k: v for k, v in r.settings.items() if k not in OF_RUN} | {"verifier version": r.verifier}
        for r in (first, other)
    )
    if changed := first_difference(one, two):
        raise UserError(
            f"benchmark {other.benchmark}: {where} was evaluated with other settings than another run: "
            f"{changed}. Delete the {FOLDER} folders of one kind and repeat the command"
        )


def table_lines(suite: Suite, rows: Sequence[BenchmarkRow]) -> list[dict[str, str]]:
    """The rows of Table 1: one per agent and arm, one column per benchmark, with published figures."""
    if suite.benchmarks is None:
        return []
    benchmarks = suite.benchmarks.chosen
    return [
        {"team / agent": f"{row.team} / {row.agent}", "arm": row.arm}
        | {b.title: _cell(row.scores[b.name].mean, row.published.get(b.name)) for b in benchmarks}
        | {"mean": _cell(row.mean, row.published.get("mean"))}
        for row in rows
    ]


def _cell(score: float, published: float | None) -> str:
    return f"{100 * score:.1f}" + (f" ({published:g})" if published is not None else "")
