"""Two runs of the same agents, compared agent by agent on the same held-out problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hacrl.config import Config
from hacrl.statistics import Estimate, estimate
from hacrl.store.reader import read_scores
from hacrl.store.rundir import RunDirectory
from hacrl.study.inspect.summary import AgentSummary, paired_difference, summarise
from hacrl.study.tables import duration, percent, plain_table, points_text


@dataclass(frozen=True)
class Row:
    """One agent before training, trained alone, and trained together.

    Example: Row("wren", Estimate(0.25, ...), Estimate(0.41, ...), Estimate(0.52, ...),
             gain=Estimate(0.27, ...), gain_alone=Estimate(0.16, ...), margin=Estimate(0.11, ...),
             rollouts=(10240, 10240), updates=(40, 120), seconds=(40.0, 60.0))
    """

    agent: str
    before: Estimate
    alone: Estimate
    together: Estimate
    gain: Estimate
    """together - before, paired by problem."""
    gain_alone: Estimate
    """alone - before, paired by problem."""
    margin: Estimate
    """together - alone, paired by problem."""
    rollouts: tuple[int, int]
    """Drawn by the agent alone and together."""
    updates: tuple[int, int]
    """Made alone and together: sharing brings more samples, so more minibatches."""
    seconds: tuple[float, float]


def compare(alone: Path, together: Path) -> list[Row]:
    """Read both runs; every number is recounted from the stored replies."""
    left, right = RunDirectory.open(alone), RunDirectory.open(together)
    by_name = {a.name: a for a in summarise(left).agents}
    return [
        _row(left, right, by_name[agent.name], agent)
        for agent in summarise(right).agents
        if agent.learns and agent.name in by_name
    ]


def _row(left: RunDirectory, right: RunDirectory, alone: AgentSummary, team: AgentSummary) -> Row:
    start = right.evaluation(0, team.name)
    after_alone = left.evaluation(alone.scores[-1].step, alone.name)
    after = right.evaluation(team.scores[-1].step, team.name)
    differences = [
        paired_difference(a, b)
        for a, b in ((start, after), (start, after_alone), (after_alone, after))
    ]
    gain, gain_alone, margin = (d for d in differences if d is not None)
    return Row(
        agent=team.name,
        before=_recount(start),
        alone=_recount(after_alone),
        together=_recount(after),
        gain=gain,
        gain_alone=gain_alone,
        margin=margin,
        rollouts=(alone.rollouts, team.rollouts),
        updates=(alone.updates, team.updates),
        seconds=(alone.seconds, team.seconds),
    )


def _recount(folder: Path) -> Estimate:
    return estimate(list(read_scores(folder).values()))


def comparison_table(rows: Sequence[Row], config: Config) -> Table:
    settings = config.evaluation
    table = plain_table("\nheld-out accuracy in percent, with 95 % intervals")
    table.caption = (
        f"{settings.problems} problems x {settings.samples} replies, never trained on; gain = "
        "together - before, margin = together - alone, both paired by problem, in points"
    )
    table.add_column("agent", no_wrap=True)
    names = ("before", "alone (gspo)", f"together ({config.algorithm.name})", "gain", "margin")
    for name in (*names, "rollouts each", "time alone", "together"):
        table.add_column(name, justify="right")
    for row in rows:
        same = row.rollouts[0] == row.rollouts[1]
        table.add_row(
            row.agent,
            percent(row.before),
            percent(row.alone),
            percent(row.together),
            points_text(row.gain),
            points_text(row.margin),
            f"{row.rollouts[1]:,}" if same else f"{row.rollouts[0]:,} / {row.rollouts[1]:,}",
            duration(row.seconds[0]),
            duration(row.seconds[1]),
        )
    return table


def sentence(rows: Sequence[Row]) -> str:
    """What came out, whichever way; no verdict where an interval contains zero."""
    gain = sum(row.gain.mean for row in rows) / len(rows)
    better = [r.agent for r in rows if r.margin.low > 0]
    worse = [r.agent for r in rows if r.margin.high < 0]
    open_ = [r.agent for r in rows if r.margin.low <= 0 <= r.margin.high]
    parts = []
    if better:
        parts.append(f"{_and(better)} did better together than alone")
    if worse:
        parts.append(f"{_and(worse)} did worse together than alone")
    if open_:
        parts.append(f"for {_and(open_)} the interval contains zero, so this run does not tell")
    return (
        f"Together the agents gained {100 * gain:+.1f} points on average; with as many rollouts "
        f"each, {'; '.join(parts)}. Rollouts are equal, updates are not: "
        f"{_span(r.updates[0] for r in rows)} alone, {_span(r.updates[1] for r in rows)} together. "
        "One seed is an anecdote."
    )


def _span(values: Iterable[int]) -> str:
    low, *_, high = sorted([*values] * 2)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
