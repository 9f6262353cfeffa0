"""Learning curves as SVG inside HTML: a line for each arm, a band from its lowest to its highest
seed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hacrl.study.compare.blocks import Chart
from hacrl.study.compare.results import Band

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#777777")
"""Told apart with colour-blind eyes as well; after the last they come again, dashed."""
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 34


def svg(chart: Chart) -> str:
    """One chart with its legend below."""
    points = [band for _, curve in chart.lines for band in curve]
    x_most = max((b.rollouts for b in points), default=1.0) or 1.0
    low, high = _range(points)

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_most
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)
        return f"{across:.1f},{down:.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}: '
        'held-out accuracy by own rollouts">'
    ]
    for i in range(5):
        y = low + (high - low) * i / 4
        left, right = place(0, y), place(x_most, y)
        (x0, y0), (x1, y1) = (p.split(",") for p in (left, right))
        parts.append(f'<line class="grid" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y0}" dy="4" class="left">{100 * y:.0f}</text>')
    for share in (0.0, 0.5, 1.0):
        x = place(share * x_most, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 18}" class="below">{share * x_most:,.0f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" class="below">own rollouts</text>')
    for number, (name, curve) in enumerate(chart.lines):
        colour, dash = style(number)
        upper = [place(b.rollouts, b.high) for b in curve]
        lower = [place(b.rollouts, b.low) for b in reversed(curve)]
        line = [place(b.rollouts, b.mean) for b in curve]
        parts.append(f'<polygon fill="{colour}" class="band" points="{" ".join(upper + lower)}"/>')
        parts.append(
            f'<polyline stroke="{colour}"{dash} class="curve" points="{" ".join(line)}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        for band, point in zip(curve, line, strict=True):
            x, y_text = point.split(",")
            told = f"{name}, step {band.step}: {100 * band.mean:.1f} %"
            parts.append(
                f'<circle cx="{x}" cy="{y_text}" r="2.5" fill="{colour}">'
                f"<title>{escape(told)}</title></circle>"
            )
    legend = "".join(
        f'<span><i style="background:{style(i)[0]}"></i>{escape(name)}'
        f"{' (dashed)' if style(i)[1] else ''}</span>"
        for i, (name, _) in enumerate(chart.lines)
    )
    return "\n".join([*parts, "</svg>", f'<p class="legend">{legend}</p>'])


def style(number: int) -> tuple[str, str]:
    """Colour and dashes of a line."""
    dash = ' stroke-dasharray="6 3"' if number >= len(COLOURS) else ""
    return COLOURS[number % len(COLOURS)], dash


def _range(points: Sequence[Band]) -> tuple[float, float]:
    """A little air, never empty, never outside 0 to 1."""
    low = min((b.low for b in points), default=0.0)
    high = max((b.high for b in points), default=1.0)
    air = max(0.05 * (high - low), 0.01)
    return max(0.0, low - air), min(1.0, high + air)
