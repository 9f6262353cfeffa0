"""Results of benchmarks: result.json of each one, and the summary of all agents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table

from hacrl.errors import UserError
from hacrl.replies import Evaluation, Row, count, judged_counts, judged_text
from hacrl.statistics import Estimate, estimate_scores
from hacrl.store.files import write_atomic
from hacrl.store.rows import read_object, write_object
from hacrl.study.benchmarks.catalogue import Headline
from hacrl.study.tables import percent, plain_table
from hacrl.study.templates import render

REPEAT = "Delete the file's folder and repeat the `hacrl eval` command"


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
    score: Estimate  # the figure that `headline` names
    figures: Evaluation
    settings: Mapping[str, Any]
    verifier: str  # name and version of the verifier

    @property
    def label(self) -> str:
        """e.g. avg@1 or best@30 (draws)"""
        name, draws = ("best", " (draws)") if self.headline == "drawn" else (self.headline, "")
        return f"{name}@{self.figures.samples}{draws}"


_RESULT = TypeAdapter(BenchmarkResult)


@dataclass(frozen=True)
class Summary:
    """All results, benchmark by benchmark.

    Example: Summary((result,)).mean("wren")
    """

    results: tuple[BenchmarkResult, ...]

    @property
    def agents(self) -> list[str]:
        return list(dict.fromkeys(result.agent for result in self.results))

    @property
    def benchmarks(self) -> list[str]:
        return list(dict.fromkeys(result.benchmark for result in self.results))

    def result(self, benchmark: str, agent: str) -> BenchmarkResult:
        wanted = (benchmark, agent)
        return next(r for r in self.results if (r.benchmark, r.agent) == wanted)

    def mean(self, agent: str) -> float:
        """Mean of the agent's headline figures; every benchmark counts once."""
        return fmean(result.score.mean for result in self.results if result.agent == agent)


def count_headline(rows: Sequence[Row], headline: Headline) -> tuple[Evaluation, Estimate]:
    """The figures of the rows of replies.jsonl, and the one to report. A UserError if no reply could
    be judged."""
    figures = count(rows, estimate_scores)
    score: Estimate | None = getattr(figures, headline)
    if score is None:
        first = next((row for row in rows if row["detail"]), None)
        reason = f"; the first: {first['status']}, {first['detail']}" if first else ""
        raise UserError(f"none of the {figures.replies} replies could be judged{reason}")
    return figures, score


def read_result(folder: Path) -> BenchmarkResult:
    return _RESULT.validate_python(read_object(folder / "result.json", REPEAT))


def write_summary(out: Path, summary: Summary) -> None:
    """Write summary.json and summary.md."""
    content = {
        "means": {agent: summary.mean(agent) for agent in summary.agents},
        "results": [asdict(result) for result in summary.results],
    }
    write_object(out / "summary.json", content, indent=2)
    lines = list(_headlines(summary))
    write_atomic(
        out / "summary.md", render("benchmarks/summary.md.j2", summary=summary, lines=lines)
    )


def summary_table(summary: Summary) -> Table:
    """The headline figures, one row per benchmark."""
    title = "percent, with the 95 % interval over problems"
    table = plain_table(title, ["benchmark"], ["figure", "problems", *summary.agents])
    for line in _headlines(summary):
        table.add_row(*line)
    return table


def _headlines(summary: Summary) -> Iterator[list[str]]:
    for name in summary.benchmarks:
        found = [summary.result(name, agent) for agent in summary.agents]
        judged = [judged_text(*judged_counts(r.figures.metrics())) for r in found]
        scores = [percent(r.score) + text for r, text in zip(found, judged, strict=True)]
        yield [found[0].title, found[0].label, str(found[0].figures.problems), *scores]
    yield ["mean", "", "", *(f"{100 * summary.mean(agent):.1f}" for agent in summary.agents)]
