"""Tables of a run for the terminal."""

from __future__ import annotations

from datetime import timedelta
from math import isfinite

from rich.console import Console
from rich.table import Table

from hacrl.statistics import Estimate
from hacrl.study.inspect.summary import AgentSummary, Checks, RunSummary, Score

NARROWEST = 100
"""Columns assumed where the output is no terminal (a file, a pipe)."""


def console() -> Console:
    """Standard output for tables."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=max(made.width, NARROWEST))


def summary_table(summary: RunSummary) -> Table:
    """Agents by row: held-out accuracy before, after, best; rewards; what was spent."""
    title = (
        f"{summary.path}: {summary.config.algorithm.name}, step {summary.steps_done} "
        f"of {summary.config.steps}"
    )
    table = plain_table(title)
    table.caption = (
        "before, after, best: held-out accuracy in percent with its 95 % interval; gain: paired by "
        "problem; reward: mean of the first and the last few training steps"
        + _checks_text(summary.checks)
    )
    table.add_column("agent", no_wrap=True)
    for name in ("before", "after", "gain", "best (step)", "reward", "rollouts", "updates"):
        table.add_column(name, justify="right")
    table.add_column("peers used", justify="right")
    table.add_column("time", justify="right")
    for agent in summary.agents:
        table.add_row(*_cells(agent))
    return table


def _checks_text(checks: Checks | None) -> str:
    """What diagnostics cost, and their warnings."""
    if checks is None:
        return ""
    cost = (
        f"\ndiagnostics: checks at {checks.count} steps, {checks.rollouts:,} rollouts and "
        f"{duration(checks.seconds)} besides those above"
    )
    return "\n".join([cost, *checks.warnings])


def _cells(agent: AgentSummary) -> list[str]:
    edges = agent.reward_edges
    best = agent.best
    return [
        agent.name if agent.learns else f"{agent.name} (frozen)",
        score_text(agent.before),
        score_text(agent.after),
        points_text(agent.gain),
        f"{100 * best.accuracy.mean:.1f} ({best.step})" if best else "-",
        f"{edges[0]:.2f}→{edges[1]:.2f}" if edges else "-",
        f"{agent.rollouts:,}",
        f"{agent.updates:,}",
        f"{agent.peers_used:.0%}" if agent.peers_used is not None else "-",
        duration(agent.seconds),
    ]


def plain_table(title: str) -> Table:
    """The look of every table: no box, few lines."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )


def score_text(score: Score | None) -> str:
    return percent(score.accuracy) if score else "-"


def percent(e: Estimate) -> str:
    """e.g. 61.0±3.8, or 61.0 [55.0, 64.1] where the interval is not symmetric"""
    return f"{100 * e.mean:.1f}{_interval(e, '')}"


def points_text(e: Estimate | None) -> str:
    """A difference in percentage points, e.g. +12.3±4.2"""
    return "-" if e is None else f"{100 * e.mean:+.1f}{_interval(e, '+')}"


def _interval(e: Estimate, sign: str) -> str:
    if not isfinite(e.low):
        return ""  # one seed has no interval
    if e.method == "normal":
        return f"±{50 * (e.high - e.low):.1f}"
    return f" [{100 * e.low:{sign}.1f}, {100 * e.high:{sign}.1f}]"


def duration(seconds: float) -> str:
    """e.g. 8.3 s, 2:05, 1:02:05"""
    return (
        f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds))).lstrip("0:")
    )
