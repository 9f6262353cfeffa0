"""The report's section on the checks of the theory: baselines, and what each source brings."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, sqrt

from hacrl.statistics import Estimate
from hacrl.study.compare.blocks import Block, Grid, Heading, Listing, Paragraph
from hacrl.study.compare.results import Results, Row
from hacrl.study.compare.theory import Theory
from hacrl.study.diagnostics.baseline import BASELINES
from hacrl.study.tables import duration


def theory_blocks(results: Results) -> Iterator[Block]:
    """Nothing but how to have it, where diagnostics were off."""
    rows = [(row, row.theory) for row in results.rows if row.theory is not None]
    yield Heading("Diagnostics of the theory")
    if not rows:
        yield Paragraph("Not measured: diagnostics.every is 0 (docs/diagnostics.md).")
        return
    yield Paragraph(
        "Every few steps, before the first update, from fresh replies of the learner that train "
        "nothing; means over checks, then over seeds with their 95 % interval. Rollouts and time of the "
        "checks are in no other figure and in no budget. bias: mean over problems of the baseline "
        "less the learner's true mean reward, in points of reward; the theorem says 0 for capability. "
        "noise: standard deviation of the baseline of one problem over other draws. off: root mean "
        "square, over problems, of the bias on one problem, which the theorem does not promise away."
    )
    yield Grid(
        (
            "team / agent",
            "arm",
            "checks",
            "rollouts",
            "time",
            *(f"{figure}: {name}" for figure in ("bias", "noise", "off") for name in BASELINES),
        ),
        tuple(_baseline_row(row, found) for row, found in rows),
    )
    yield Paragraph(
        "cosine: of a source's gradient with the learner's own; for the learner itself, between the "
        "halves of its own problems, which is what noise leaves of 1. gradient: norm before clipping; "
        "update: |displacement| of the weights by one update. gain: what one step of the source's "
        "samples brings on held-out problems to first order, in points of reward. hurts: seeds in which "
        "the evidence over a run's checks says that it is below zero."
    )
    columns = ("team / agent", "arm", "source", "cosine", "gradient", "update", "used", "effective")
    yield Grid(
        (*columns, "gain a step", "hurts"),
        tuple(
            _source_row(row, found, source)
            for row, found in rows
            for source in found.sources(row.agent)
        ),
        words=3,
    )
    warned = tuple(
        f"{row.team} / {row.agent}, {row.arm}, seed {w.seed}: {w.sentence}"
        for row, found in rows
        for w in found.warnings
    )
    yield Listing(warned or ("No run found a peer that hurts.",))


def _baseline_row(row: Row, found: Theory) -> tuple[str, ...]:
    return (
        f"{row.team} / {row.agent}",
        row.arm,
        f"{found.checks:g}",
        f"{found.rollouts:,.0f}",
        duration(found.seconds),
        *(_points(found.figures.get(f"bias/{name}")) for name in BASELINES),
        *(_root(found.figures.get(f"variance/{name}")) for name in BASELINES),
        *(_root(found.figures.get(f"spread_squared/{name}")) for name in BASELINES),
    )


def _source_row(row: Row, found: Theory, source: str) -> tuple[str, ...]:
    figures, own = found.figures, source == row.agent
    warned = sum(w.peer == source for w in found.warnings)
    return (
        f"{row.team} / {row.agent}",
        row.arm,
        f"{source} (own)" if own else source,
        _plain(figures.get(f"cosine/{source}")),
        _plain(figures.get(f"gradient_norm/{source}")),
        _plain(figures.get(f"update_norm/{source}")),
        _share(row.diagnostics.get(f"peers/used/{source}")),
        _share(row.diagnostics.get(f"peers/effective/{source}")),
        _points(figures.get(f"gain/{source}")),
        "" if own else f"{warned} of {len(row.seeds)}",
    )


def _points(e: Estimate | None) -> str:
    """+1.25 [+0.40, +2.10], the interval where there are two seeds."""
    if e is None:
        return ""
    interval = f" [{100 * e.low:+.2f}, {100 * e.high:+.2f}]" if isfinite(e.low) else ""
    return f"{100 * e.mean:+.2f}{interval}"


def _root(e: Estimate | None) -> str:
    """The root of a mean square in points; an estimate of it may fall below zero."""
    return "" if e is None else f"{100 * sqrt(max(0.0, e.mean)):.1f}"


def _plain(e: Estimate | None) -> str:
    return "" if e is None else f"{e.mean:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
