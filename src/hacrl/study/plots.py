"""Figures with matplotlib: the curves of one run as a PNG file, and the figures of a comparison."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hacrl.statistics import Estimate

if TYPE_CHECKING:
    from hacrl.study.compare.results import Row
    from hacrl.study.inspect.summary import RunSummary

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#777777")
"""Distinguishable with colour blindness; after the last they repeat with dashed lines."""
SPARKS = "▁▂▃▄▅▆▇█"


def reward_lines(summary: RunSummary) -> str:
    """The reward curve of every agent as one line of block characters, for the terminal."""
    width = max(len(agent.name) for agent in summary.agents)
    lines = [
        f"{agent.name:{width}} {values[0]:.2f} {sparkline(values)} {values[-1]:.2f}"
        for agent in summary.agents
        if (values := [value for _, value in agent.rewards])
    ]
    return "\n".join(["\nreward per step", *lines]) if lines else ""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """At most `width` block characters, from the lowest value to the highest.

    Example: sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    """
    size = -(-len(values) // width)
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    means = [fmean(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(SPARKS[int(7 * (m - low) / ((high - low) or 1))] for m in means)


def write_png(summary: RunSummary, path: Path) -> None:
    """Training reward (single steps and moving average) and held-out accuracy with its 95 % interval."""
    with _figure(11, 4) as (figure, (left, right)):
        for number, agent in enumerate(summary.agents):
            style = _style(number)
            if agent.rewards:
                steps, values = zip(*agent.rewards, strict=True)
                left.plot(steps, values, **style, alpha=0.25)
                window = min(5, len(values))
                means = [fmean(values[i : i + window]) for i in range(len(values) - window + 1)]
                left.plot(steps[window - 1 :], means, **style, label=agent.name)
            if agent.scores:
                estimates = [s.accuracy for s in agent.scores]
                _curve(right, [s.step for s in agent.scores], estimates, number, agent.name)
        _label(left, "training reward", "step", "mean reward")
        _label(right, "held-out accuracy", "step", "accuracy")
        figure.suptitle(f"{summary.path.name} ({summary.config.algorithm.name})")
        figure.savefig(path, dpi=150, format="png")


def comparison_figure(rows: Sequence[Row], reference: str) -> str:
    """One agent under every arm, as the data URI of an SVG image: learning curves with a band from
    the lowest to the highest seed, and the difference of each arm to the reference."""
    others = [(i, row.difference) for i, row in enumerate(rows) if row.difference]
    with _figure(11, max(3.4, 1.2 + 0.3 * len(rows))) as (figure, (left, right)):
        for number, row in enumerate(rows):
            x = [band.rollouts for band in row.curve]
            bands = [Estimate(100 * b.mean, 100 * b.low, 100 * b.high, 0) for b in row.curve]
            _curve(left, x, bands, number, row.arm)
        _label(left, "learning curves", "own rollouts", "held-out accuracy in %")
        left.xaxis.set_major_formatter("{x:,.0f}")
        for y, (number, found) in enumerate(others):
            e = found.interval
            ends = (
                [[100 * (e.mean - e.low)], [100 * (e.high - e.mean)]] if isfinite(e.low) else None
            )
            right.errorbar(
                100 * e.mean, y, xerr=ends, fmt="o", capsize=3, color=_style(number)["color"]
            )
        right.axvline(0, color="black", linewidth=0.8)
        right.set_yticks(range(len(others)), [rows[number].arm for number, _ in others])
        right.set_ylim(max(1, len(others)) - 0.5, -0.5)
        _label(right, f"difference to {reference}", "points, with 95 % interval", "")
        return _data_uri(figure)


def exchange_figure(rows: Sequence[Row]) -> str:
    """Exchange rates with their intervals and n, as the data URI of an SVG image; "" if there are none.
    Arrows: the interval goes on beyond the curve of learning alone. Rates that are not identifiable have
    no point."""
    found = [(row, row.exchange) for row in rows if row.exchange]
    if not found:
        return ""
    arms = list(dict.fromkeys(row.arm for row, _ in found))
    with _figure(8, 1.2 + 0.3 * len(found), columns=1) as (figure, axes):
        for y, (row, rate) in enumerate(found):
            color = _style(arms.index(row.arm))["color"]
            axes.plot(rate.n, y, marker="|", markersize=12, color="black")
            if rate.flat:
                axes.text(rate.multiples[0], y, " not identifiable", va="center", color=color)
                continue
            low, f, high = (
                min(max(value, rate.multiples[0]), rate.multiples[-1])
                for value in (rate.low, rate.f, rate.high)
            )
            axes.plot([low, high], [y, y], color=color)
            axes.plot(low, y, marker="|" if rate.low else "<", color=color)
            axes.plot(high, y, marker="|" if isfinite(rate.high) else ">", color=color)
            axes.plot(f, y, marker="o", color=color)
        axes.set_yticks(range(len(found)), [f"{row.name}, {row.arm}" for row, _ in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="f, with 95 % interval; black: n")
        axes.grid(alpha=0.3)
        return _data_uri(figure)


@contextmanager
def _figure(width: float, height: float, columns: int = 2) -> Iterator[tuple[Any, Any]]:
    """A figure with one axes or several, without a display; fixed ids make its SVG reproducible."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "hacrl", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(1, columns)


def _curve(
    axes: Any, x: Sequence[float], points: Sequence[Estimate], number: int, name: str
) -> None:
    style = _style(number)
    axes.plot(x, [p.mean for p in points], marker="o", markersize=3, label=name, **style)
    low, high = [p.low for p in points], [p.high for p in points]
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(nbins=6, integer=x in ("step", "own rollouts"))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _style(number: int) -> dict[str, str]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": "-" if number < len(COLOURS) else "--",
    }


def _data_uri(figure: Any) -> str:
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
