"""Suites of benchmarks: each agent alone on every benchmark, every reply kept.

OUT/BENCHMARK/AGENT/settings.json   what was asked, written first
OUT/BENCHMARK/AGENT/replies.jsonl   every reply with its verdict
OUT/BENCHMARK/AGENT/result.json     the figures, written last: a cell with a result is whole
OUT/summary.json, OUT/summary.md    all cells side by side
OUT/times.jsonl                     seconds and tokens, chunk by chunk
"""

from __future__ import annotations

from hacrl.study.benchmarks.catalogue import (
    PROMPT,
    SUITES,
    Benchmark,
    Suite,
    find_suite,
    load_problems,
)
from hacrl.study.benchmarks.cell import CellResult, Figures, count_figures, recount
from hacrl.study.benchmarks.contestants import contestants_of
from hacrl.study.benchmarks.run import Contestant, SuiteSettings, evaluate_suite
from hacrl.study.benchmarks.summary import (
    SuiteResult,
    read_suite,
    recount_suite,
    summary_markdown,
    write_summary,
)

__all__ = [
    "PROMPT",
    "SUITES",
    "Benchmark",
    "CellResult",
    "Contestant",
    "Figures",
    "Suite",
    "SuiteResult",
    "SuiteSettings",
    "contestants_of",
    "count_figures",
    "evaluate_suite",
    "find_suite",
    "load_problems",
    "read_suite",
    "recount",
    "recount_suite",
    "summary_markdown",
    "write_summary",
]
