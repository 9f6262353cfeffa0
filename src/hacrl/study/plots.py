"""The curves of one run: as a PNG file with matplotlib, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hacrl.replies import score_name
from hacrl.statistics import Estimate

if TYPE_CHECKING:
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
    """Write the curves of a run as a PNG file."""
    run_figure(summary).savefig(path, dpi=150, format="png")


def run_figure(summary: RunSummary) -> Any:
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
        name = "mean held-out reward"
        if score_name(summary.config.verifier.kind)[1]:
            name = "held-out accuracy"
        _label(right, name, "step", name.rpartition(" ")[2])
        figure.suptitle(f"{summary.path.name} ({summary.config.algorithm.name})")
        return figure


@contextmanager
def _figure(width: float, height: float, columns: int = 2) -> Iterator[tuple[Any, Any]]:
    """A figure with axes side by side, without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9}):
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
