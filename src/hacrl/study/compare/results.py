"""From finished runs to numbers: means over seeds, paired differences to the reference, verdicts.

A difference has two 95 % intervals that cover different sources of error. Student's t over seeds
accounts for the small number of seeds; the paired bootstrap over seeds and problems accounts for the
choice of problems. The reported interval is the smallest one that contains both.

An arm is better (or worse) than the reference for an agent only if that interval excludes zero and
the t test's p value is at most 0.05 after Holm's correction for all comparisons of the suite.
Otherwise the comparison is open.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.fingerprint import config_by_key
from hacrl.replies import judged_text, score_name
from hacrl.statistics import LEVEL, Estimate, crossed_bootstrap, holm, t_interval, t_test
from hacrl.study.compare.benchmarks import BenchmarkRow, benchmark_rows
from hacrl.study.compare.budget import limited_by
from hacrl.study.compare.checks import TheoryChecks, theory_checks
from hacrl.study.compare.exchange import Exchange, exchange_rate
from hacrl.study.compare.reading import AgentRun, Point, first_reach, mean_height, read_run
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
    p: float
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
class Reach:
    """Rollouts or seconds to the target: mean over the seeds that reached it.

    Example: Reach(mean=2210.0, reached=4, seeds=5)
    """

    mean: float | None
    reached: int
    seeds: int


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
    difference: Difference | None  # None for the reference, and if no seed is finished in both arms
    area: Estimate | None  # mean accuracy along the learning curve
    rollouts_to_target: Reach
    seconds_to_target: Reach
    rollouts: float
    updates: float
    seconds: float
    """Own rollouts, updates and the team's training seconds up to the reported evaluation; means
    over seeds."""
    curve: tuple[Band, ...]
    diagnostics: Mapping[str, float]
    files: tuple[str, ...]
    """Evaluation folders with the replies behind `after`, relative to the suite's folder."""
    theory: TheoryChecks | None = None  # None if diagnostics were off
    exchange: Exchange | None = None
    """None for the suite's arms `alone`, and if it names none or they share no finished seed."""

    @property
    def name(self) -> str:
        return f"{self.team} / {self.agent}"


@dataclass(frozen=True)
class Results:
    """All numbers of a report."""

    suite: Suite
    reference: str
    changes: tuple[str, ...]
    rows: tuple[Row, ...]
    targets: Mapping[tuple[str, str], float]  # (team, agent) -> target accuracy
    missing: tuple[str, ...]  # names of the runs that are not finished
    problems: int  # held-out problems of the smallest comparison
    replies: int
    start_gap: float
    """Largest difference between two arms in an agent's accuracy before training with the same seed;
    0 if initial weights and noise streams are identical."""
    environment: Mapping[str, Any]  # versions and hardware of the first run
    benchmarks: tuple[BenchmarkRow, ...] = ()  # empty if the suite names no benchmarks
    unequal: tuple[str, ...] = ()
    """Arms whose held-out problems or verifier are not those of the reference, a sentence each."""
    partial: bool = False  # some verifier knows partial rewards: means are no accuracies

    @property
    def score(self) -> str:
        """What `before`, `after` and `accuracies` of a row are."""
        return "mean reward" if self.partial else "accuracy"

    @property
    def comparisons(self) -> int:
        return sum(row.difference is not None and row.difference.testable for row in self.rows)

    def by_agent(self) -> dict[tuple[str, str], list[Row]]:
        """(team, agent) -> its rows, one per arm."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.team, row.agent), []).append(row)
        return found


def collect(
    suite: Suite, runs: Sequence[Run], changes: Sequence[str] = (), reference: str = ""
) -> Results:
    """Read every finished run and compare with the reference arm (default: the suite's)."""
    reference = reference or suite.reference
    agent_runs = _read_all(suite, runs)
    agent_runs += _alone_elsewhere(suite, agent_runs, changes)
    if not agent_runs:
        raise UserError(
            f'budget = "time" needs a finished run of the reference {suite.reference!r}'
        )
    out = runs[0].folder.parents[3]
    targets, rows = {}, []
    for team, agent in dict.fromkeys((r.run.team, r.agent) for r in agent_runs):
        here = [r for r in agent_runs if (r.run.team, r.agent) == (team, agent)]
        against = [r for r in here if r.run.arm == reference]
        if suite.target or against:
            targets[(team, agent)] = suite.target or fmean(r.last.accuracy for r in against)
        for arm in suite.arms:
            if mine := [r for r in here if r.run.arm == arm.name]:
                target = targets.get((team, agent), 1.0)
                pairs = None if arm.name == reference else difference(mine, against)
                row = _row(mine, pairs, arm.factor, target, out)
                if suite.alone and arm.name not in suite.alone:
                    alone = [[r for r in here if r.run.arm == name] for name in suite.alone]
                    row = replace(row, exchange=exchange_rate(mine, alone))
                rows.append(row)
    return Results(
        suite,
        reference,
        tuple(changes),
        tuple(_corrected(rows)),
        targets,
        tuple(run.name for run in runs if not run.finished),
        min(len(r.scores) for r in agent_runs),
        runs[0].config.evaluation.samples,
        _start_gap(agent_runs),
        agent_runs[0].run.environment,
        tuple(benchmark_rows(suite, runs)),
        tuple(_unequal(runs, reference)),
        any(not score_name(run.config.verifier.kind)[1] for run in runs),
    )


def _unequal(runs: Sequence[Run], reference: str) -> Iterable[str]:
    """A sentence for each arm that is evaluated in another way than the reference."""
    measured = {(r.team, r.seed): _measured(r.config) for r in runs if r.arm == reference}
    for arm in dict.fromkeys(run.arm for run in runs):
        changed: dict[str, None] = {}
        for run in (run for run in runs if run.arm == arm and (run.team, run.seed) in measured):
            mine, theirs = _measured(run.config), measured[run.team, run.seed]
            changed |= dict.fromkeys(
                key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)
            )
        if changed:
            yield (
                f"Arm {arm} is evaluated in another way than {reference} ({', '.join(changed)}): their "
                "accuracies are not comparable, and differences use only common problems."
            )


def _measured(config: Config) -> dict[str, Any]:
    """The settings that decide about held-out problems and how their replies are judged."""
    keys = ["evaluation.", "verifier.kind", "verifier.options", "verifier.rewards", "task.held_out"]
    keys += [] if config.task.held_out or config.task.held_out_split else ["task.train"]
    found = config_by_key(config)
    return {k: v for k, v in found.items() if k.startswith(tuple(keys)) and k != "evaluation.every"}


def _read_all(suite: Suite, runs: Sequence[Run]) -> list[AgentRun]:
    """The reference is read first: what it spent limits the other arms with budget = "time", and arms
    with dynamic sampling with budget = "rollouts". Without it, such a run is not read."""
    reference = suite.reference
    factor = {arm.name: arm.factor for arm in suite.arms}
    found: list[AgentRun] = []
    spent: dict[tuple[str, int], dict[str, Point]] = {}
    for run in sorted((r for r in runs if r.finished), key=lambda run: run.arm != reference):
        field, pair = limited_by(suite.budget, run.config), (run.team, run.seed)
        if run.arm == reference:
            found += (agent_runs := read_run(run))
            spent[pair] = {r.agent: r.last for r in agent_runs}
        elif field is None:
            found += read_run(run)
        elif pair in spent:
            ratio = factor[run.arm] / factor[reference]
            limits = {a: (field, getattr(p, field) * ratio) for a, p in spent[pair].items()}
            found += read_run(run, limits)
    return found


def _alone_elsewhere(
    suite: Suite, found: Sequence[AgentRun], changes: Sequence[str]
) -> list[AgentRun]:
    """Runs of agents that learn alone, for the teams in which their arm is not trained: those of another
    team with the same agent."""
    borrowed: list[AgentRun] = []
    trained = {r.run.team for r in found}
    for arm in suite.arms:
        mine = [r for r in found if r.run.arm == arm.name]
        teams = [
            team
            for team in suite.all_teams
            if arm.teams is not None and team.name not in arm.teams and team.name in trained
        ]
        for team, seed in ((team, seed) for team in teams for seed in suite.seeds):
            config = make_config(suite, team, arm, seed, changes)
            if uses_peers(config):
                break
            agents = {agent.name: agent for agent in config.agents}
            same = {
                r.agent: replace(r, run=replace(r.run, team=team.name))
                for r in mine
                if r.run.seed == seed and agents.get(r.agent) in r.run.config.agents
            }
            borrowed += same.values()
    return borrowed


def _row(
    mine: Sequence[AgentRun], pairs: Difference | None, factor: float, target: float, out: Path
) -> Row:
    first = mine[0]
    curves = [[(p.rollouts, p.accuracy) for p in r.curve] for r in mine]
    areas = [area for curve in curves if (area := mean_height(curve)) is not None]
    by_seconds = [[(p.seconds, p.accuracy) for p in r.curve] for r in mine]
    keys = sorted({key for r in mine for key in r.metrics})
    return Row(
        team=first.run.team,
        agent=first.agent,
        arm=first.run.arm,
        factor=factor,
        seeds=tuple(r.run.seed for r in mine),
        before=_accuracy([r.curve[0].accuracy for r in mine]),
        after=_accuracy([r.last.accuracy for r in mine]),
        accuracies=tuple(r.last.accuracy for r in mine),
        judged=(_judged([r.curve[0] for r in mine]), _judged([r.last for r in mine])),
        failure=next((r.failure for r in mine if r.failure), ""),
        difference=pairs,
        area=_accuracy(areas) if len(areas) == len(mine) else None,
        rollouts_to_target=_reach([first_reach(curve, target) for curve in curves]),
        seconds_to_target=_reach([first_reach(curve, target) for curve in by_seconds]),
        rollouts=fmean(r.last.rollouts for r in mine),
        updates=fmean(r.updates for r in mine),
        seconds=fmean(r.last.seconds for r in mine),
        curve=_bands(mine),
        diagnostics={key: fmean(r.metrics[key] for r in mine if key in r.metrics) for key in keys},
        files=tuple(r.folder.relative_to(out).as_posix() for r in mine),
        theory=theory_checks(mine),
    )


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
    return Difference(
        t_interval(by_seed),
        crossed_bootstrap(table),
        above=sum(d > 0 for d in by_seed),
        below=sum(d < 0 for d in by_seed),
        p=t_test(by_seed),
    )


def _accuracy(values: Sequence[float]) -> Estimate:
    """Mean over seeds; the interval is clipped to [0, 1]."""
    e = t_interval(values)
    return e if e.count < 2 else replace(e, low=max(0.0, e.low), high=min(1.0, e.high))


def _judged(points: Sequence[Point]) -> str:
    return judged_text(*(sum(counts) for counts in zip(*(p.judged for p in points), strict=True)))


def _corrected(rows: Sequence[Row]) -> Iterable[Row]:
    """Holm's correction over every comparison of the suite that has a test."""
    tested = [row.difference.p for row in rows if row.difference and row.difference.testable]
    chances = iter(holm(tested))
    for row in rows:
        if row.difference and row.difference.testable:
            yield replace(row, difference=replace(row.difference, corrected=next(chances)))
        else:
            yield row


def _reach(spent: Sequence[float | None]) -> Reach:
    found = [s for s in spent if s is not None]
    return Reach(fmean(found) if found else None, len(found), len(spent))


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


def _start_gap(agent_runs: Sequence[AgentRun]) -> float:
    starts: dict[tuple[str, str, int], list[float]] = {}
    for r in agent_runs:
        starts.setdefault((r.run.team, r.agent, r.run.seed), []).append(r.curve[0].accuracy)
    return max(max(values) - min(values) for values in starts.values())
