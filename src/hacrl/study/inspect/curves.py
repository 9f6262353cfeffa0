"""Curves of a run: in the terminal, drawn with braille dots, and as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rich.text import Text

from hacrl.study.inspect.summary import Curve, RunSummary

COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
"""Colours of the agents in the terminal, in turn."""
PNG_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The same for the picture: told apart with colour-blind eyes as well."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot in a braille character: 4 rows, 2 columns."""


def run_curves(summary: RunSummary, width: int = 72) -> Text:
    """Training reward and held-out accuracy of every agent, one plot each."""
    plots = [("reward of a step", {a.name: smooth(a.rewards) for a in summary.agents})]
    accuracies = {a.name: a.accuracies for a in summary.agents}
    if any(len(curve) > 2 for curve in accuracies.values()):  # two points are in the table
        plots.append(("held-out accuracy", accuracies))
    text = Text()
    for title, curves in plots:
        if any(curves.values()):
            text.append(f"\n{title}\n", style="bold")
            text.append_text(plot(curves, width))
    return text


def smooth(curve: Curve, window: int = 5) -> Curve:
    """Trailing mean over a few steps, for the eye only; short curves stay as they are."""
    if len(curve) < 4 * window:
        return curve
    values = [value for _, value in curve]
    return [
        (step, sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window))
        for i, (step, _) in enumerate(curve)
    ]


def plot(curves: Mapping[str, Curve], width: int = 72, height: int = 8) -> Text:
    """Lines over steps in a box of characters, with a scale at the left and a legend below."""
    shown = {name: curve for name, curve in curves.items() if curve}
    steps = [step for curve in shown.values() for step, _ in curve]
    values = [value for curve in shown.values() for _, value in curve]
    x_range = (min(steps), max(steps))
    y_range = _nice_range(min(values), max(values))
    columns = max(10, width - 7)
    canvas = _Canvas(columns, height)
    for number, curve in enumerate(shown.values()):
        canvas.line([_place(p, x_range, y_range, canvas) for p in curve], number)
    text = Text()
    for row in range(height):
        share = 1 - row / (height - 1)
        label = f"{y_range[0] + share * (y_range[1] - y_range[0]):.2f}"
        text.append(f"{label if row in (0, height - 1) else '':>5} ", style="dim")
        text.append_text(canvas.row(row))
        text.append("\n")
    first, last = (str(x) for x in x_range)
    text.append(
        f"{'':6}{first}{'step':^{max(4, columns - len(first) - len(last))}}{last}\n", style="dim"
    )
    text.append(" " * 6)
    for number, name in enumerate(shown):
        text.append(f"━ {name}  ", style=COLOURS[number % len(COLOURS)])
    text.append("\n")
    return text


def _nice_range(low: float, high: float) -> tuple[float, float]:
    """A little air around the values; never an empty range."""
    air = 0.05 * (high - low) or 0.05
    return low - min(air, low) if low >= 0 else low - air, high + air


def _place(
    point: tuple[int, float],
    x_range: tuple[int, int],
    y_range: tuple[float, float],
    canvas: _Canvas,
) -> tuple[int, int]:
    across = (point[0] - x_range[0]) / max(1, x_range[1] - x_range[0])
    up = (point[1] - y_range[0]) / (y_range[1] - y_range[0])
    return round(across * (canvas.dots_wide - 1)), round((1 - up) * (canvas.dots_high - 1))


class _Canvas:
    """Characters of 2 x 4 dots; each has the colour of the line that came last."""

    def __init__(self, columns: int, rows: int) -> None:
        self.dots_wide, self.dots_high = 2 * columns, 4 * rows
        self._bits = [[0] * columns for _ in range(rows)]
        self._line = [[0] * columns for _ in range(rows)]

    def line(self, points: Sequence[tuple[int, int]], number: int) -> None:
        self._dot(*points[0], number)
        for (x0, y0), (x1, y1) in pairwise(points):
            length = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(length + 1):
                x, y = x0 + (x1 - x0) * i / length, y0 + (y1 - y0) * i / length
                self._dot(round(x), round(y), number)

    def _dot(self, x: int, y: int, number: int) -> None:
        self._bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        self._line[y // 4][x // 2] = number

    def row(self, row: int) -> Text:
        text = Text()
        for bits, number in zip(self._bits[row], self._line[row], strict=True):
            character = chr(0x2800 + bits) if bits else " "
            text.append(character, style=COLOURS[number % len(COLOURS)] if bits else "")
        return text


def write_png(summary: RunSummary, path: Path) -> None:
    """Reward and held-out accuracy (with its 95 percent interval) side by side."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for number, agent in enumerate(summary.agents):
        colour = PNG_COLOURS[number % len(PNG_COLOURS)]
        if agent.rewards:
            left.plot(*zip(*agent.rewards, strict=True), color=colour, alpha=0.25)
            smoothed = zip(*smooth(agent.rewards), strict=True)
            left.plot(*smoothed, color=colour, label=agent.name)
        if agent.scores:
            steps = [s.step for s in agent.scores]
            right.plot(
                steps, [s.accuracy.mean for s in agent.scores], "o-", color=colour, label=agent.name
            )
            right.fill_between(
                steps,
                [s.accuracy.low for s in agent.scores],
                [s.accuracy.high for s in agent.scores],
                color=colour,
                alpha=0.15,
            )
    left.set(title="training reward", xlabel="step", ylabel="mean reward")
    right.set(title="held-out accuracy", xlabel="steps done", ylabel="accuracy")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(frameon=False)
    figure.suptitle(f"{summary.path.name} ({summary.config.algorithm.name})")
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)
