"""Results of benchmarks: result.json of each one, and the summary of all agents side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from hacrl.errors import UserError
from hacrl.replies import Evaluation, Row, count
from hacrl.statistics import Estimate, estimate_scores
from hacrl.store.files import write_atomic
from hacrl.store.reader import read_replies
from hacrl.study.benchmarks.catalogue import Headline


@dataclass(frozen=True)
class BenchmarkResult:
    """result.json: one agent on one benchmark.

    Example: BenchmarkResult(benchmark="aime25", title="AIME 2025", agent="wren", headline="best",
             score=Estimate(0.1, ...), figures=Evaluation(...), settings={...}, verifier="math/1")
    """

    benchmark: str
    title: str
    agent: str
    headline: Headline
    score: Estimate
    """The figure that `headline` names."""
    figures: Evaluation
    settings: Mapping[str, Any]
    verifier: str
    """Name and version of the verifier."""

    @property
    def label(self) -> str:
        """e.g. best@30"""
        return f"{self.headline}@{self.figures.samples}"


_RESULT = TypeAdapter(BenchmarkResult)


@dataclass(frozen=True)
class Summary:
    """All results, benchmark by benchmark.

    Example: read_summary(Path("runs/benchmarks-wren")).mean("wren")
    """

    results: tuple[BenchmarkResult, ...]

    @property
    def agents(self) -> list[str]:
        return list(dict.fromkeys(result.agent for result in self.results))

    @property
    def benchmarks(self) -> list[str]:
        return list(dict.fromkeys(result.benchmark for result in self.results))

    def result(self, benchmark: str, agent: str) -> BenchmarkResult | None:
        wanted = (benchmark, agent)
        return next((r for r in self.results if (r.benchmark, r.agent) == wanted), None)

    def mean(self, agent: str) -> float:
        """Mean of the agent's headline figures; every benchmark counts once."""
        return fmean(result.score.mean for result in self.results if result.agent == agent)


def count_headline(rows: Sequence[Row], headline: Headline) -> tuple[Evaluation, Estimate]:
    """The figures of the rows of replies.jsonl, and the one to report. A UserError if no reply could
    be judged."""
    figures = count(rows, estimate_scores)
    score = figures.avg if headline == "avg" else figures.best
    if score is None:
        first = next((row for row in rows if row["detail"]), None)
        reason = f"; the first: {first['status']}, {first['detail']}" if first else ""
        raise UserError(f"none of the {figures.replies} replies could be judged{reason}")
    return figures, score


def read_result(folder: Path) -> BenchmarkResult:
    return _RESULT.validate_json((folder / "result.json").read_text(encoding="utf-8"))


def write_summary(out: Path, summary: Summary) -> None:
    """Write summary.json and summary.md."""
    content = {
        "means": {agent: summary.mean(agent) for agent in summary.agents},
        "results": [asdict(result) for result in summary.results],
    }
    write_atomic(out / "summary.json", json.dumps(content, indent=2) + "\n")
    write_atomic(out / "summary.md", summary_markdown(summary))


def read_summary(out: Path) -> Summary:
    """Read summary.json."""
    path = out / "summary.json"
    if not path.is_file():
        raise UserError(f"{out} has no summary.json: no benchmark evaluation was finished there")
    content = json.loads(path.read_text(encoding="utf-8"))
    if "results" not in content:
        raise UserError(
            f"{path} was written by an older version; repeat the `hacrl eval` command that wrote it: "
            "finished benchmarks are not run again"
        )
    return Summary(tuple(map(_RESULT.validate_python, content["results"])))


def recount(out: Path) -> Summary:
    """The same summary with all figures counted again from the replies on disk."""
    results = []
    for result in read_summary(out).results:
        folder = out / result.benchmark / result.agent
        if not (rows := read_replies(folder)):
            raise UserError(f"{folder} has no replies.jsonl, so there is nothing to count")
        figures, score = count_headline(rows, result.headline)
        results.append(replace(result, figures=figures, score=score))
    return Summary(tuple(results))


def summary_markdown(summary: Summary) -> str:
    """Two tables: the headline figures, and all figures."""
    headlines, details = ("\n".join(table(summary)) for table in (_headlines, _details))
    return f"""# Benchmarks: each agent alone

Percent, with the 95 % interval over problems in brackets.

{headlines}

## All figures

pass@k is the unbiased estimate; tokens: mean (median) length of a reply; truncated: fraction of
replies that reached the limit; unparsed: replies without an answer; unjudged: timeouts + errors of
the verifier; too long: problems not attempted.

{details}
"""


def _headlines(summary: Summary) -> list[str]:
    rows = [["benchmark", "figure", "problems", *summary.agents]]
    for name in summary.benchmarks:
        found = [summary.result(name, agent) for agent in summary.agents]
        first = next(result for result in found if result is not None)
        scores = [_score_text(result.score) if result else "-" for result in found]
        rows.append([first.title, first.label, str(first.figures.problems), *scores])
    rows.append(["mean", "", "", *(f"{100 * summary.mean(a):.1f}" for a in summary.agents)])
    return _table(rows)


def _details(summary: Summary) -> list[str]:
    names = (
        "avg",
        "best",
        "maj",
        "pass",
        "tokens",
        "truncated",
        "unparsed",
        "unjudged",
        "too long",
    )
    rows = [["benchmark", "agent", "k", *names]]
    for result in summary.results:
        f, verdicts = result.figures, result.figures.verdicts
        means = [f"{100 * e.mean:.1f}" if e else "-" for e in (f.avg, f.best, f.majority)]
        passes = ", ".join(f"{k}: {100 * v:.1f}" for k, v in f.passes.items())
        tokens = f"{f.reply_tokens:.0f} ({f.reply_tokens_median:.0f})"
        unjudged = f"{verdicts['timeout']} + {verdicts['error']}"
        row = [result.title, result.agent, str(f.samples), *means, passes, tokens]
        row += [f"{100 * f.truncated:.1f} %", str(verdicts["unparsed"]), unjudged]
        rows.append([*row, str(f.not_attempted)])
    return _table(rows)


def _score_text(e: Estimate) -> str:
    """e.g. 10.0 [1.8, 40.4]"""
    return f"{100 * e.mean:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with aligned columns, the first two to the left."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        aligned = [
            text.ljust(w) if i < 2 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("| " + " | ".join(aligned) + " |")
    return lines
