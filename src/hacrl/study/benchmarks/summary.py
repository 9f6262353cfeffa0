"""All cells of a suite side by side: summary.json for programs, summary.md for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter

from hacrl.errors import UserError
from hacrl.statistics import Estimate
from hacrl.store.files import write_atomic
from hacrl.study.benchmarks.cell import CellResult, recount

_CELL = TypeAdapter(CellResult)


@dataclass(frozen=True)
class SuiteResult:
    """Every cell, benchmark by benchmark in the suite's order.

    Example: SuiteResult("math7", (CellResult("math500", ...), ...)).mean("wren")
    """

    suite: str
    cells: tuple[CellResult, ...]

    @property
    def agents(self) -> list[str]:
        return list(dict.fromkeys(cell.agent for cell in self.cells))

    @property
    def benchmarks(self) -> list[str]:
        return list(dict.fromkeys(cell.benchmark for cell in self.cells))

    def cell(self, benchmark: str, agent: str) -> CellResult | None:
        return next((c for c in self.cells if (c.benchmark, c.agent) == (benchmark, agent)), None)

    def mean(self, agent: str) -> float:
        """Plain mean of the agent's headline figures, each benchmark counting once."""
        return fmean(cell.score.mean for cell in self.cells if cell.agent == agent)


def write_cell(folder: Path, result: CellResult) -> None:
    write_atomic(folder / "result.json", json.dumps(asdict(result), indent=2) + "\n")


def read_cell(folder: Path) -> CellResult:
    return _CELL.validate_json((folder / "result.json").read_text(encoding="utf-8"))


def write_summary(out: Path, result: SuiteResult) -> None:
    """summary.json names the cells in order; the figures are those of each result.json."""
    summary = {
        "suite": result.suite,
        "means": {agent: result.mean(agent) for agent in result.agents},
        "cells": [asdict(cell) for cell in result.cells],
    }
    write_atomic(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomic(out / "summary.md", summary_markdown(result))


def read_suite(out: Path) -> SuiteResult:
    """What summary.json says."""
    path = out / "summary.json"
    if not path.is_file():
        raise UserError(f"{out} has no summary.json: it holds no finished evaluation of a suite")
    summary = json.loads(path.read_text(encoding="utf-8"))
    return SuiteResult(
        summary["suite"], tuple(_CELL.validate_python(cell) for cell in summary["cells"])
    )


def recount_suite(out: Path) -> SuiteResult:
    """The same cells with all figures counted anew from the replies on disk."""
    stored = read_suite(out)
    cells = []
    for cell in stored.cells:
        figures = recount(out / cell.benchmark / cell.agent)
        cells.append(replace(cell, figures=figures, score=figures.headline(cell.headline)))
    return SuiteResult(stored.suite, tuple(cells))


def summary_markdown(result: SuiteResult) -> str:
    """Two tables: the headline figures, and what lies behind them."""
    return "\n".join(
        [
            f"# {result.suite}: each agent alone",
            "",
            "Percent, with the 95 % interval over problems in brackets.",
            "",
            *_headlines(result),
            "",
            "## Behind it",
            "",
            "pass@k is the unbiased estimate; tokens: mean (median) length of a reply; cut: share of "
            "replies that ran into the limit; unparsed: replies without an answer; unjudged: "
            "time-outs + errors of the verifier; too long: problems not attempted.",
            "",
            *_details(result),
            "",
        ]
    )


def score_text(e: Estimate) -> str:
    """e.g. 10.0 [1.8, 40.4]"""
    return f"{100 * e.mean:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]"


def _headlines(result: SuiteResult) -> list[str]:
    rows = [["benchmark", "figure", "problems", *result.agents]]
    for name in result.benchmarks:
        cells = [result.cell(name, agent) for agent in result.agents]
        first = next(cell for cell in cells if cell is not None)
        scores = [score_text(cell.score) if cell else "-" for cell in cells]
        rows.append([first.title, first.label, str(first.figures.problems), *scores])
    means = [f"{100 * result.mean(agent):.1f}" for agent in result.agents]
    rows.append(["mean", "", "", *means])
    return _table(rows, left=2)


def _details(result: SuiteResult) -> list[str]:
    names = ("avg", "best", "maj", "pass", "tokens", "cut", "unparsed", "unjudged", "too long")
    rows = [["benchmark", "agent", "k", *names]]
    for cell in result.cells:
        f = cell.figures
        passes = ", ".join(f"{k}: {100 * v:.1f}" for k, v in f.passes.items())
        rows.append(
            [
                cell.title,
                cell.agent,
                str(f.samples),
                *(f"{100 * e.mean:.1f}" for e in (f.avg, f.best, f.majority)),
                passes,
                f"{f.reply_tokens:.0f} ({f.reply_tokens_median:.0f})",
                f"{100 * f.truncated:.1f} %",
                str(f.verdicts["unparsed"]),
                f"{f.verdicts['timeout']} + {f.verdicts['error']}",
                str(f.not_attempted),
            ]
        )
    return _table(rows, left=2)


def _table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A Markdown table that is also readable as plain text; the first `left` columns on the left."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]
