"""From readings to figures: means over seeds, paired differences to the reference, verdicts.

A difference has two 95 percent intervals, each of which sees what the other misses: Student's t over
seeds knows that five seeds are few; the paired bootstrap over seeds and problems knows that other
problems might say otherwise. The interval that is shown and judged reaches from the lower of their
low ends to the higher of their high ends.

An arm is better (or worse) than the reference for an agent only if that interval excludes zero, and
the t test's p value stays at or below 0.05 after Holm's correction for all comparisons of the suite.
Everything else is open, whichever way the mean lies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from hacrl.errors import UserError
from hacrl.statistics import (
    LEVEL,
    Estimate,
    crossed_bootstrap,
    first_reach,
    holm,
    mean_height,
    t_interval,
    t_test,
)
from hacrl.study.compare.reading import Reading, read_cell
from hacrl.study.compare.suite import Cell, LoadedSuite
from hacrl.study.compare.theory import Theory, theory

Verdict = Literal["better", "worse", "open"]


@dataclass(frozen=True)
class Difference:
    """An arm minus the reference for one agent, paired by seed and problem.

    Example: Difference(Estimate(0.03, 0.01, 0.05, 5, "t"), Estimate(0.03, 0.012, 0.049, 5,
             "crossed bootstrap"), above=5, below=0, p=0.01, corrected=0.04)
    """

    seeds: Estimate
    """Interval over seeds by Student's t: other seeds, the same held-out problems."""
    crossed: Estimate
    """Interval by the bootstrap over seeds and problems: other problems as well."""
    above: int
    """Seeds in which the arm was above the reference."""
    below: int
    p: float
    corrected: float = 1.0
    """p after Holm's correction for all comparisons of the suite."""

    @property
    def interval(self) -> Estimate:
        """Both together: what is shown and judged."""
        low = min(self.seeds.low, self.crossed.low)
        high = max(self.seeds.high, self.crossed.high)
        return Estimate(self.seeds.mean, low, high, self.seeds.count, "t and crossed bootstrap")

    @property
    def testable(self) -> bool:
        """One seed has no spread, so no interval and no test."""
        return self.seeds.count > 1

    @property
    def side(self) -> Verdict:
        """What the interval says, before the correction."""
        if self.interval.low > 0:
            return "better"
        return "worse" if self.interval.high < 0 else "open"

    @property
    def verdict(self) -> Verdict:
        return self.side if self.corrected <= LEVEL else "open"


@dataclass(frozen=True)
class Reach:
    """What it took to reach the target: the mean over the seeds that did.

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
    """One agent of a team under one arm, over all seeds that are finished."""

    team: str
    agent: str
    arm: str
    factor: float
    seeds: tuple[int, ...]
    before: Estimate
    after: Estimate
    difference: Difference | None
    """None for the reference, and where no seed is finished in both."""
    area: Estimate | None
    """Mean accuracy along the learning curve."""
    rollouts_to_target: Reach
    seconds_to_target: Reach
    rollouts: float
    updates: float
    seconds: float
    """Spent up to the evaluation that is read: own rollouts, updates, the team's training seconds;
    means over seeds."""
    curve: tuple[Band, ...]
    diagnostics: Mapping[str, float]
    files: tuple[str, ...]
    """The evaluation folders that the accuracy was counted from."""
    theory: Theory | None = None
    """Where the runs had diagnostics on."""


@dataclass(frozen=True)
class Results:
    loaded: LoadedSuite
    changes: tuple[str, ...]
    rows: tuple[Row, ...]
    targets: Mapping[tuple[str, str], float]
    """(team, agent) -> accuracy asked for in "to target"."""
    missing: tuple[str, ...]
    """Cells that are not finished."""
    problems: int
    """Held-out problems of the smallest comparison."""
    replies: int
    start_gap: float
    """The largest difference between two arms in an agent's accuracy before training, with the same
    seed: 0 where start weights and streams are the same to the last digit."""
    environment: Mapping[str, Any]
    """Versions and hardware, of the first cell."""

    @property
    def comparisons(self) -> int:
        return sum(row.difference is not None and row.difference.testable for row in self.rows)


def collect(loaded: LoadedSuite, cells: Sequence[Cell], changes: Sequence[str] = ()) -> Results:
    """Read every finished cell and compare."""
    readings = _read_all(loaded, cells)
    if not readings:
        raise UserError(
            f'budget = "time" needs a finished cell of the reference {loaded.suite.reference!r}'
        )
    out = cells[0].folder.parents[3]
    targets, rows = {}, []
    for team, agent in dict.fromkeys((r.cell.team, r.agent) for r in readings):
        here = [r for r in readings if (r.cell.team, r.agent) == (team, agent)]
        against = [r for r in here if r.cell.arm == loaded.suite.reference]
        if loaded.suite.target or against:
            targets[(team, agent)] = loaded.suite.target or _accuracy(against)
        for arm in loaded.arms:
            mine = [r for r in here if r.cell.arm == arm.name]
            if mine:
                target = targets.get((team, agent), 1.0)
                rows.append(_row(mine, against, arm.factor, target, loaded.suite.reference, out))
    return Results(
        loaded,
        tuple(changes),
        tuple(_corrected(rows)),
        targets,
        tuple(cell.name for cell in cells if not cell.finished),
        min(len(r.scores) for r in readings),
        cells[0].config.evaluation.samples,
        _start_gap(readings),
        json.loads((readings[0].cell.folder / "environment.json").read_text(encoding="utf-8")),
    )


def _read_all(loaded: LoadedSuite, cells: Sequence[Cell]) -> list[Reading]:
    """With the rule "time" an arm waits for the reference's time, so its cell is needed first."""
    finished = [cell for cell in cells if cell.finished]
    reference, by_time = loaded.suite.reference, loaded.suite.budget == "time"
    factor = {arm.name: arm.factor for arm in loaded.arms}
    readings = []
    limit: dict[tuple[str, int], float] = {}
    for cell in sorted(finished, key=lambda cell: cell.arm != reference):
        place = (cell.team, cell.seed)
        if not by_time or cell.arm == reference:
            found = read_cell(cell)
            limit[place] = found[0].last.seconds / factor[reference]
        elif place in limit:
            found = read_cell(cell, limit[place] * factor[cell.arm])
        else:
            continue
        readings += found
    return readings


def _row(
    mine: Sequence[Reading],
    against: Sequence[Reading],
    factor: float,
    target: float,
    reference: str,
    out: Path,
) -> Row:
    first = mine[0]
    curves = [[(p.rollouts, p.accuracy) for p in r.curve] for r in mine]
    areas = [area for curve in curves if (area := mean_height(curve)) is not None]
    by_rollouts = [first_reach(curve, target) for curve in curves]
    by_seconds = [first_reach([(p.seconds, p.accuracy) for p in r.curve], target) for r in mine]
    keys = sorted({key for r in mine for key in r.diagnostics})
    return Row(
        team=first.cell.team,
        agent=first.agent,
        arm=first.cell.arm,
        factor=factor,
        seeds=tuple(r.cell.seed for r in mine),
        before=_share([r.curve[0].accuracy for r in mine]),
        after=_share([r.last.accuracy for r in mine]),
        difference=None if first.cell.arm == reference else difference(mine, against),
        area=_share(areas) if len(areas) == len(mine) else None,
        rollouts_to_target=_reach(by_rollouts),
        seconds_to_target=_reach(by_seconds),
        rollouts=fmean(r.last.rollouts for r in mine),
        updates=fmean(r.updates for r in mine),
        seconds=fmean(r.last.seconds for r in mine),
        curve=_bands(mine),
        diagnostics={
            key: fmean(r.diagnostics[key] for r in mine if key in r.diagnostics) for key in keys
        },
        files=tuple(r.folder.relative_to(out).as_posix() for r in mine),
        theory=theory(mine),
    )


def difference(mine: Sequence[Reading], against: Sequence[Reading]) -> Difference | None:
    """Over the seeds that both have, on the problems that all of their evaluations judged."""
    theirs = {r.cell.seed: r.scores for r in against}
    pairs = [(r.scores, theirs[r.cell.seed]) for r in mine if r.cell.seed in theirs]
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


def _share(values: Sequence[float]) -> Estimate:
    """An accuracy lies between 0 and 1, and so does its interval."""
    e = t_interval(values)
    return e if e.count < 2 else replace(e, low=max(0.0, e.low), high=min(1.0, e.high))


def _corrected(rows: Sequence[Row]) -> Iterable[Row]:
    """Holm over every comparison of the suite that has a test."""
    tested = [row.difference.p for row in rows if row.difference and row.difference.testable]
    chances = iter(holm(tested))
    for row in rows:
        if row.difference and row.difference.testable:
            yield replace(row, difference=replace(row.difference, corrected=next(chances)))
        else:
            yield row


def _accuracy(readings: Sequence[Reading]) -> float:
    return fmean(r.last.accuracy for r in readings)


def _reach(spent: Sequence[float | None]) -> Reach:
    found = [s for s in spent if s is not None]
    return Reach(fmean(found) if found else None, len(found), len(spent))


def _bands(readings: Sequence[Reading]) -> tuple[Band, ...]:
    """At the evaluations that every seed has."""
    points = [{p.step: p for p in r.curve} for r in readings]
    bands = []
    for step in sorted(set.intersection(*(set(p) for p in points))):
        here = [p[step] for p in points]
        heights = [p.accuracy for p in here]
        spent = fmean(p.rollouts for p in here)
        bands.append(Band(step, spent, fmean(heights), min(heights), max(heights)))
    return tuple(bands)


def _start_gap(readings: Sequence[Reading]) -> float:
    starts: dict[tuple[str, str, int], list[float]] = {}
    for r in readings:
        place = (r.cell.team, r.agent, r.cell.seed)
        starts.setdefault(place, []).append(r.curve[0].accuracy)
    return max(max(values) - min(values) for values in starts.values())
