"""report.md and report.html (one file, no network) and results.json, from the same figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from hacrl.store.files import write_atomic
from hacrl.study.compare.blocks import Block, Chart, Grid, Heading, Listing, Paragraph
from hacrl.study.compare.budget import RULES
from hacrl.study.compare.charts import svg
from hacrl.study.compare.contents import contents, verdicts
from hacrl.study.compare.results import Results

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th { vertical-align: bottom; } .word { text-align: left; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { flex: 1 1 420px; max-width: 580px; margin: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
.grid { stroke: var(--line); } .left { text-anchor: end; } .below { text-anchor: middle; }
.band { opacity: .13; } .curve { fill: none; stroke-width: 2; }
.legend { margin: 0; font-size: 13px; } .legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
li { overflow-wrap: anywhere; }
"""


def write_report(results: Results, out: Path) -> str:
    """Write the three files; the verdicts, one line an agent, come back."""
    blocks = list(contents(results))
    title = f"Comparison: {results.loaded.path.stem}"
    write_atomic(out / "results.json", json.dumps(as_json(results), indent=1) + "\n")
    write_atomic(
        out / "report.md", f"# {title}\n\n" + "\n".join(filter(None, map(_markdown, blocks)))
    )
    write_atomic(out / "report.html", page(title, blocks))
    return "\n".join(verdicts(results))


def as_json(results: Results) -> dict[str, Any]:
    """Every figure; an interval without an end (one seed) has null there."""
    suite = results.loaded.suite
    return _plain(
        {
            "suite": results.loaded.path.name,
            "changes": results.changes,
            "budget": suite.budget,
            "rule": RULES[suite.budget],
            "reference": suite.reference,
            "seeds": suite.seeds,
            "comparisons": results.comparisons,
            "correction": "holm",
            "problems": results.problems,
            "replies": results.replies,
            "start_gap": results.start_gap,
            "environment": results.environment,
            "missing": results.missing,
            "targets": [
                {"team": team, "agent": agent, "accuracy": accuracy}
                for (team, agent), accuracy in results.targets.items()
            ],
            "verdicts": list(verdicts(results)),
            "rows": [
                asdict(row) | {"verdict": row.difference.verdict if row.difference else None}
                for row in results.rows
            ],
        }
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# ---------------------------------------------------------------- Markdown


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"## {block.text}\n"
    if isinstance(block, Paragraph):
        return f"{block.text}\n"
    if isinstance(block, Listing):
        return "".join(f"- {item}\n" for item in block.items)
    if isinstance(block, Grid):
        marks = ["---" if i < block.words else "---:" for i in range(len(block.columns))]
        lines = [block.columns, marks, *block.rows]
        return "".join(f"| {' | '.join(_cell(c) for c in line)} |\n" for line in lines)
    return ""  # curves stand as figures in the table below them


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---------------------------------------------------------------- HTML


def page(title: str, blocks: list[Block]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(_html(blocks)) + "\n</body></html>\n"
    )


def _html(blocks: list[Block]) -> Iterator[str]:
    charts: list[str] = []
    for block in blocks:
        if isinstance(block, Chart):
            charts.append(
                f"<figure><figcaption>{escape(block.title)}</figcaption>{svg(block)}</figure>"
            )
            continue
        if charts:
            yield f'<div class="charts">{"".join(charts)}</div>'
            yield "<p>Lines: means over seeds. Bands: from the lowest to the highest seed.</p>"
            charts = []
        yield _element(block)


def _element(block: Heading | Paragraph | Listing | Grid) -> str:
    if isinstance(block, Heading):
        return f"<h2>{escape(block.text)}</h2>"
    if isinstance(block, Paragraph):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Listing):
        return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"
    head = "".join(f"<th{_class(i, block)}>{escape(c)}</th>" for i, c in enumerate(block.columns))
    body = "".join(
        f"<tr>{''.join(f'<td{_class(i, block)}>{escape(c)}</td>' for i, c in enumerate(row))}</tr>"
        for row in block.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _class(column: int, block: Grid) -> str:
    return ' class="word"' if column < block.words else ""
