"""One cell of a suite, an agent on a benchmark: its figures, counted from the lines of replies.jsonl
and from nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hacrl.errors import UserError
from hacrl.statistics import Estimate, best_at_k, estimate_scores, majority_at_k, pass_at_k
from hacrl.store.files import read_whole_lines
from hacrl.study.benchmarks.catalogue import Headline
from hacrl.types import Finish, Status

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """What the replies to a set of problems add up to. Means are over problems, and so are the
    intervals (statistics.estimate_scores says which kind). A reply that could not be judged (TIMEOUT,
    ERROR) is left out of its problem, a problem without a judged reply out of the means; a problem
    that was too long to attempt counts as not solved.

    Example: Figures(problems=30, samples=30, replies=900, avg=Estimate(0.01, ...), ...)
    """

    problems: int
    samples: int
    """k: replies to each problem."""
    replies: int
    avg: Estimate
    """avg@k: a problem scores the mean reward of its replies."""
    best: Estimate
    """best@k: a problem scores the largest reward among its k replies."""
    majority: Estimate
    """maj@k: a problem scores the reward of its most frequent answer (statistics.majority_at_k)."""
    passes: Mapping[int, float]
    """pass@j for j = 1, 2, 4, ... and k: unbiased estimates of the chance that one of j replies is
    right; over the problems with at least j judged replies."""
    verdicts: Mapping[str, int]
    """Replies by status: ok, wrong, unparsed, timeout, error."""
    not_attempted: int
    """Problems whose prompt was too long."""
    unjudged: int
    """Problems left out because no reply to them could be judged."""
    reply_tokens: float
    """Mean length of a reply in the agent's own tokens."""
    reply_tokens_median: float
    truncated: float
    """Share of replies cut at the limit."""

    def headline(self, which: Headline) -> Estimate:
        return self.avg if which == "avg" else self.best


@dataclass(frozen=True)
class CellResult:
    """result.json: the figures with what they are figures of.

    Example: CellResult(benchmark="aime25", title="AIME 2025", agent="wren", headline="best",
             score=Estimate(0.1, ...), figures=Figures(...), settings={...}, verifier="math/1")
    """

    benchmark: str
    title: str
    agent: str
    headline: Headline
    score: Estimate
    """The headline figure."""
    figures: Figures
    settings: Mapping[str, Any]
    verifier: str
    """Name and version of the verifier."""

    @property
    def label(self) -> str:
        """e.g. best@30"""
        return f"{self.headline}@{self.figures.samples}"


def count_figures(rows: Sequence[Row]) -> Figures:
    """The figures of the lines of a replies.jsonl."""
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    samples = 1 + max((row["index"] for row in rows), default=0)
    judged = {
        name: found
        for name, group in problems.items()
        if (found := sorted((r for r in group if _judged(r)), key=lambda r: r["index"]))
    }
    attempted = [row for row in rows if row["finish"] != Finish.NOT_ATTEMPTED]
    if not judged:
        first = next((r for r in attempted if r["detail"]), None)
        why = f"; the first: {first['status']}, {first['detail']}" if first else ""
        raise UserError(f"none of the {len(attempted)} replies could be judged{why}")
    counts = Counter(row["status"] for row in attempted)
    lengths = [row["tokens"] for row in attempted] or [0]
    return Figures(
        problems=len(problems),
        samples=samples,
        replies=len(attempted),
        avg=estimate_scores([fmean(r["reward"] for r in group) for group in judged.values()]),
        best=estimate_scores(
            [best_at_k([r["reward"] for r in group], samples) for group in judged.values()]
        ),
        majority=estimate_scores(
            [majority_at_k([_vote(r) for r in group], samples) for group in judged.values()]
        ),
        passes=_passes(list(judged.values()), samples),
        verdicts={status.value: counts[status.value] for status in Status},
        not_attempted=sum(
            group[0]["finish"] == Finish.NOT_ATTEMPTED for group in problems.values()
        ),
        unjudged=len(problems) - len(judged),
        reply_tokens=fmean(lengths),
        reply_tokens_median=float(median(lengths)),
        truncated=fmean([row["finish"] == Finish.LENGTH for row in attempted] or [0]),
    )


def recount(folder: Path) -> Figures:
    """The figures of a cell, counted anew from its replies.jsonl."""
    lines = read_whole_lines(folder / "replies.jsonl")
    if not lines:
        raise UserError(f"{folder} has no replies.jsonl, so there is nothing to count")
    return count_figures([json.loads(line) for line in lines])


def _judged(row: Row) -> bool:
    return row["reward"] is not None


def _vote(row: Row) -> tuple[str | None, float]:
    """The extracted answer (a verdict's detail) where the reply had one, and the reward."""
    found = row["status"] in (Status.OK, Status.WRONG)
    return (row["detail"] if found else None), row["reward"]


def _passes(groups: Sequence[Sequence[Row]], samples: int) -> dict[int, float]:
    """pass@j at the powers of two and at k itself."""
    ladder = sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples})
    passes = {}
    for k in ladder:
        chances = [
            pass_at_k(len(group), sum(r["status"] == Status.OK for r in group), k)
            for group in groups
            if len(group) >= k
        ]
        if chances:
            passes[k] = fmean(chances)
    return passes
