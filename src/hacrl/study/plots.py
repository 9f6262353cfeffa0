"""The curves of one run: as a PNG file with matplotlib, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hacrl.replies import score_name

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


def run_figure(summary: RunSummary) -> Any:
    """Training reward (single steps and moving average) and held-out accuracy with its 95 % interval, as
    a matplotlib figure that needs no display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, agent in enumerate(summary.agents):
            line = "-" if number < len(COLOURS) else "--"
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": line}
            if agent.rewards:
                steps, values = zip(*agent.rewards, strict=True)
                left.plot(steps, values, **style, alpha=0.25)
                window = min(5, len(values))
                means = [fmean(values[i : i + window]) for i in range(len(values) - window + 1)]
                left.plot(steps[window - 1 :], means, **style, label=agent.name)
            if agent.scores:
                at, found = [s.step for s in agent.scores], [s.accuracy for s in agent.scores]
                means = [e.mean for e in found]
                right.plot(at, means, marker="o", markersize=3, label=agent.name, **style)
                low, high = [e.low for e in found], [e.high for e in found]
                right.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
        accurate = score_name(summary.config.verifier.kind)[1]
        held_out = "held-out accuracy" if accurate else "mean held-out reward"
        titles = {"training reward": "mean reward", held_out: held_out.rpartition(" ")[2]}
        for axes, (title, name) in zip((left, right), titles.items(), strict=True):
            axes.set(title=title, xlabel="step", ylabel=name)
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(nbins=6, integer=True)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(frameon=False)
        figure.suptitle(f"{summary.path.name} ({summary.config.algorithm.name})")
        return figure
