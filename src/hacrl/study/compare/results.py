"""From finished runs to numbers: means over seeds, paired differences to the reference, verdicts.

A difference has two 95 % intervals that cover different sources of error. Student's t over seeds
accounts for the small number of seeds; the paired bootstrap over seeds and problems accounts for the
choice of problems. The reported interval is the smallest one that contains both.

An arm is better (or worse) than the reference for an agent only if that interval excludes zero and
the p value is at most 0.05 after Holm's correction for all comparisons of the suite. The p value is the
larger one of the t test and of the bootstrap. Otherwise the comparison is open.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.replies import judged_text, score_name
from hacrl.statistics import (
    LEVEL,
    Estimate,
    bootstrap_test,
    crossed_bootstrap,
    holm,
    t_interval,
    t_test,
)
from hacrl.study.compare.benchmarks import BenchmarkRow, benchmark_rows
from hacrl.study.compare.exchange import Exchange, exchange_rate
from hacrl.study.compare.finished import settings
from hacrl.study.compare.reading import CHECKS, AgentRun, Point, mean_metrics, read_run
from hacrl.study.compare.suite import Run, Suite, make_config, uses_peers

Verdict = Literal["better", "worse", "open"]


@dataclass(frozen=True)
class Difference:
    """An arm minus the reference for one agent, paired by seed and problem.

    Example: Difference(Estimate(0.03, 0.01, 0.05, 5, "t"), Estimate(0.03, 0.012, 0.049, 5,
             "crossed bootstrap"), above=5, below=0, p=0.01, corrected=0.04)
    """

    seeds: Estimate  # interval over seeds by Student's t: other seeds, the same held-out problems
    crossed: Estimate  # interval by the bootstrap over seeds and problems
    above: int  # number of seeds in which the arm was above the reference
    below: int
    p: float  # the larger one of the t test over seeds and of the bootstrap
    corrected: float = 1.0  # p after Holm's correction for all comparisons of the suite

    @property
    def interval(self) -> Estimate:
        """The reported interval: both intervals together, or over problems only for one seed."""
        if not self.testable:
            return self.crossed
        low = min(self.seeds.low, self.crossed.low)
        high = max(self.seeds.high, self.crossed.high)
        return Estimate(self.seeds.mean, low, high, self.seeds.count, "t and crossed bootstrap")

    @property
    def testable(self) -> bool:
        """Whether there are two seeds or more: one seed has no variation to test against."""
        return self.seeds.count > 1

    @property
    def side(self) -> Verdict:
        """The verdict of the interval alone, before the correction."""
        if self.interval.low > 0:
            return "better"
        return "worse" if self.interval.high < 0 else "open"

    @property
    def verdict(self) -> Verdict:
        return self.side if self.testable and self.corrected <= LEVEL else "open"


@dataclass(frozen=True)
class Band:
    """A point of the learning curve: mean, lowest and highest seed."""

    step: int
    rollouts: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One agent of a team under one arm, over all finished seeds."""

    team: str
    agent: str
    arm: str
    factor: float
    seeds: tuple[int, ...]
    before: Estimate
    after: Estimate
    accuracies: tuple[float, ...]  # accuracy behind `after`, by seed
    judged: tuple[str, str]
    """Text after `before` and `after`: how many replies were judged; "" if all were."""
    failure: str
    """What the verifier did with replies that are not judged, in the first seed that has some."""
    rollouts: float
    updates: float
    seconds: float
    """Own rollouts, updates and the team's training seconds up to the reported evaluation; means
    over seeds."""
    curve: tuple[Band, ...]
    diagnostics: Mapping[str, float]
    files: tuple[str, ...]
    """Evaluation folders with the replies behind `after`, relative to the suite's folder."""
    theory: Mapping[str, Estimate]
    """Metrics of the theory checks (docs/diagnostics.md) without their prefix: mean over the checks of
    each seed, then mean and interval over seeds."""
    difference: Difference | None = None
    """None for the reference, and if no seed is finished in both arms."""
    exchange: Exchange | None = None
    """None for the suite's arms `alone`, and if it names none or they share no finished seed."""

    @property
    def name(self) -> str:
        return f"{self.team} / {self.agent}"

    @property
    def borrowed(self) -> bool:
        """Whether the runs are those of another team."""
        return Path(self.files[0]).parts[1] != self.team


@dataclass(frozen=True)
class Results:
    """All numbers of a report."""

    suite: Suite
    reference: str
    changes: tuple[str, ...]
    rows: tuple[Row, ...]
    missing: tuple[str, ...]  # names of the runs that are not finished
    problems: int  # held-out problems of the smallest comparison
    replies: int
    environment: Mapping[str, Any]  # versions and hardware of the first run
    benchmarks: tuple[BenchmarkRow, ...] = ()  # empty if the suite names no benchmarks
    partial: bool = False  # some verifier knows partial rewards: means are no accuracies
    options: tuple[str, ...] = ()  # --out and --kept with their values

    @property
    def score(self) -> str:
        """What `before`, `after` and `accuracies` of a row are."""
        return "mean reward" if self.partial else "accuracy"

    @property
    def comparisons(self) -> int:
        return len(_tested(self.rows, self.reference))


def collect(
    suite: Suite,
    runs: Sequence[Run],
    changes: Sequence[str] = (),
    reference: str = "",
    options: Sequence[str] = (),
) -> Results:
    """Read every finished run and compare with the reference arm (default: the suite's). `options` are
    --out and --kept with their values, for the command in the report."""
    reference = reference or suite.reference
    agent_runs = [r for run in runs if run.finished for r in read_run(run)]
    agent_runs += _alone_elsewhere(suite, agent_runs, changes)
    rows = make_rows(suite, agent_runs, reference, runs[0].folder.parents[3])
    return Results(
        suite,
        reference,
        tuple(changes),
        tuple(rows),
        tuple(run.name for run in runs if not run.finished),
        min(len(r.scores) for r in agent_runs),
        runs[0].config.evaluation.samples,
        agent_runs[0].run.environment,
        tuple(benchmark_rows(suite, agent_runs)),
        any(not score_name(run.config.verifier.kind)[1] for run in runs),
        tuple(options),
    )


def make_rows(suite: Suite, agent_runs: Sequence[AgentRun], reference: str, out: Path) -> list[Row]:
    """One row per team, agent and arm, compared with the reference. `out` is the suite's folder."""
    rows = []
    for team, agent in dict.fromkeys((r.run.team, r.agent) for r in agent_runs):
        arms: dict[str, list[AgentRun]] = {arm.name: [] for arm in suite.arms}
        for r in agent_runs:
            if (r.run.team, r.agent) == (team, agent):
                arms[r.run.arm].append(r)
        for arm in suite.arms:
            if mine := arms[arm.name]:
                row = _row(mine, arm.factor, out)
                if arm.name != reference:
                    row = replace(row, difference=difference(mine, arms[reference]))
                if suite.alone and arm.name not in suite.alone:
                    alone = [arms[name] for name in suite.alone]
                    row = replace(row, exchange=exchange_rate(mine, alone))
                rows.append(row)
    return list(_corrected(rows, reference))


def _alone_elsewhere(
    suite: Suite, found: Sequence[AgentRun], changes: Sequence[str]
) -> list[AgentRun]:
    """Runs of agents that learn alone, for the teams in which their arm is not trained: those of another
    team with the same agent and the same settings."""
    borrowed: list[AgentRun] = []
    trained = {r.run.team for r in found}
    teams = {team.name: team for team in suite.all_teams}
    for arm, team in product(suite.arms, suite.all_teams):
        if arm.teams is None or team.name in arm.teams or team.name not in trained:
            continue
        # Compared before the budget sets the steps, which are those of the run then.
        try:
            configs = {
                name: make_config(suite, teams[name], arm, suite.seeds[0], changes)
                for name in {team.name, *(r.run.team for r in found if r.run.arm == arm.name)}
            }
        except UserError:  # the arm does not fit this team, e.g. it names an agent of another one
            continue
        config = configs[team.name]
        agents = {agent.name: agent for agent in config.agents}
        alike = {n for n, other in configs.items() if _common(other) == _common(config)}
        same = {
            (r.agent, r.run.seed): replace(r, run=replace(r.run, team=team.name))
            for r in found
            if r.run.arm == arm.name
            and r.run.team in alike
            and agents.get(r.agent) in r.run.config.agents
        }
        borrowed += same.values() if not uses_peers(config) else ()
    return borrowed


def _common(config: Config) -> dict[str, Any]:
    """The settings that change results, without those of single agents."""
    return {k: v for k, v in settings(config).items() if k.partition(".")[0] != "agents"}


def _row(mine: Sequence[AgentRun], factor: float, out: Path) -> Row:
    """One agent under one arm, from its runs, without comparisons."""
    first = mine[0]
    verifier = first.run.config.verifier.kind
    keys = sorted({key for r in mine for key in r.metrics})
    return Row(
        team=first.run.team,
        agent=first.agent,
        arm=first.run.arm,
        factor=factor,
        seeds=tuple(r.run.seed for r in mine),
        before=_score([r.curve[0].accuracy for r in mine], verifier),
        after=_score([r.last.accuracy for r in mine], verifier),
        accuracies=tuple(r.last.accuracy for r in mine),
        judged=(_judged([r.curve[0] for r in mine]), _judged([r.last for r in mine])),
        failure=next((r.failure for r in mine if r.failure), ""),
        rollouts=fmean(r.last.rollouts for r in mine),
        updates=fmean(r.updates for r in mine),
        seconds=fmean(r.last.seconds for r in mine),
        curve=_bands(mine),
        diagnostics={key: fmean(r.metrics[key] for r in mine if key in r.metrics) for key in keys},
        files=tuple(r.folder.relative_to(out).as_posix() for r in mine),
        theory=_theory(mine),
    )


def _theory(mine: Sequence[AgentRun]) -> dict[str, Estimate]:
    by_seed = [mean_metrics(r.checks, CHECKS) for r in mine]
    keys = dict.fromkeys(key for means in by_seed for key in means if CHECKS.fullmatch(key))
    return {
        key.removeprefix("diagnostics/"): t_interval([m[key] for m in by_seed if key in m])
        for key in keys
    }


def difference(mine: Sequence[AgentRun], against: Sequence[AgentRun]) -> Difference | None:
    """The difference over the seeds in both, on the problems that all of their evaluations judged;
    None if there is no common seed or problem."""
    theirs = {r.run.seed: r.scores for r in against}
    pairs = [(r.scores, theirs[r.run.seed]) for r in mine if r.run.seed in theirs]
    common = sorted(set.intersection(*(set(s) for pair in pairs for s in pair))) if pairs else []
    if not common:
        return None
    table = [[a[p] - b[p] for p in common] for a, b in pairs]
    by_seed = [fmean(row) for row in table]
    crossed = crossed_bootstrap(table)
    return Difference(
        t_interval(by_seed),
        crossed,
        above=sum(d > 0 for d in by_seed),
        below=sum(d < 0 for d in by_seed),
        p=max(t_test(by_seed), bootstrap_test(crossed)),
    )


def _score(values: Sequence[float], verifier_kind: str) -> Estimate:
    """Mean over seeds; the interval of an accuracy is clipped to [0, 1]."""
    e = t_interval(values)
    clipped = e.count > 1 and score_name(verifier_kind)[1]
    return replace(e, low=max(0.0, e.low), high=min(1.0, e.high)) if clipped else e


def _judged(points: Sequence[Point]) -> str:
    return judged_text(*(sum(counts) for counts in zip(*(p.judged for p in points), strict=True)))


def _tested(rows: Sequence[Row], reference: str) -> dict[tuple[Any, Any], list[Row]]:
    """The rows of every comparison that has a test, by the evaluations of arm and reference. Agents that
    learn alone are in several teams with the same runs: such a comparison counts once."""
    theirs = {(row.team, row.agent): row.files for row in rows if row.arm == reference}
    found: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        if row.difference and row.difference.testable:
            found.setdefault((row.files, theirs[row.team, row.agent]), []).append(row)
    return found


def _corrected(rows: Sequence[Row], reference: str) -> Iterable[Row]:
    """Holm's correction over every comparison of the suite that has a test."""
    tested = list(_tested(rows, reference).values())
    chances = holm([same[0].difference.p for same in tested if same[0].difference])
    corrected = {id(row): p for same, p in zip(tested, chances, strict=True) for row in same}
    for row in rows:
        if row.difference and id(row) in corrected:
            found = replace(row.difference, corrected=corrected[id(row)])
            yield replace(row, difference=found)
        else:
            yield row


def _bands(agent_runs: Sequence[AgentRun]) -> tuple[Band, ...]:
    """The learning curve at the evaluations that every seed has."""
    points = [{p.step: p for p in r.curve} for r in agent_runs]
    bands = []
    for step in sorted(set.intersection(*(set(p) for p in points))):
        here = [p[step] for p in points]
        heights = [p.accuracy for p in here]
        spent = fmean(p.rollouts for p in here)
        bands.append(Band(step, spent, fmean(heights), min(heights), max(heights)))
    return tuple(bands)
