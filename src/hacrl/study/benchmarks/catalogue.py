"""The benchmarks of a suite and their problems, read from a folder in one plain form:

one file a benchmark, .jsonl or .jsonl.gz, one object a line with `id`, `question` and `answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hacrl.errors import UserError
from hacrl.tasks.dataset import to_problems
from hacrl.tasks.deck import hash_number
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import read_rows
from hacrl.tasks.settings import ColumnsConfig
from hacrl.types import Problem

PROMPT = "{question}\nReason step by step and put the final answer in \\boxed{{}}."

Headline = Literal["avg", "best"]


@dataclass(frozen=True)
class Benchmark:
    """One set of problems and how it is counted.

    Example: Benchmark("aime25", "AIME 2025", samples=30, headline="best")
    """

    name: str
    """Also the file's name, without .jsonl or .jsonl.gz."""
    title: str
    samples: int = 1
    """k: replies to each problem."""
    headline: Headline = "avg"
    """Which figure stands for the benchmark: avg@k or best@k."""


@dataclass(frozen=True)
class Suite:
    """Benchmarks that are reported together.

    Example: SUITES["math7"]
    """

    name: str
    benchmarks: tuple[Benchmark, ...]
    prompt: str = PROMPT

    def choose(self, names: Sequence[str]) -> tuple[Benchmark, ...]:
        """Those named, in the suite's order; all of them where none is named."""
        known = [b.name for b in self.benchmarks]
        for name in names:
            if name not in known:
                raise UserError(
                    f"benchmark {name!r} is not in the suite {self.name!r}; there are: "
                    f"{', '.join(known)}"
                )
        return tuple(b for b in self.benchmarks if not names or b.name in names)


SUITES = {
    "math7": Suite(
        "math7",
        (
            Benchmark("math500", "MATH-500"),
            Benchmark("math_test", "MATH"),
            Benchmark("gsm8k_test", "GSM8K"),
            Benchmark("aime25", "AIME 2025", samples=30, headline="best"),
            Benchmark("amc23", "AMC 23"),
            Benchmark("minerva", "Minerva"),
            Benchmark("olympiadbench", "OlympiadBench"),
        ),
    )
}
"""math7: the seven of arXiv 2603.02604, appendix A: best@30 on AIME 2025, avg@1 elsewhere."""


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise UserError(f"suite {name!r} is unknown; there are: {', '.join(SUITES)}")
    return SUITES[name]


def load_problems(
    benchmark: Benchmark, data: Path, prompt: str = PROMPT, most: int | None = None, seed: int = 0
) -> list[Problem]:
    """The benchmark's problems in the order of the file; of a larger one a fixed sample of `most`,
    chosen by a hash of (seed, id): the same on every machine, and a smaller sample is a part of a
    larger one."""
    path = _file(benchmark, data)
    template = PromptTemplate(prompt, "prompt")
    problems = to_problems(
        read_rows(path), ColumnsConfig(), template, benchmark.name, benchmark.name
    )
    if most is None or most >= len(problems):
        return problems
    if most < 1:
        raise UserError(f"problems = {most}: ask for at least 1, or leave it out for all")
    chosen = sorted(problems, key=lambda p: (hash_number("suite", seed, p.id), p.id))[:most]
    kept = {p.id for p in chosen}
    return [p for p in problems if p.id in kept]


def _file(benchmark: Benchmark, data: Path) -> Path:
    names = [f"{benchmark.name}.jsonl", f"{benchmark.name}.jsonl.gz"]
    for name in names:
        if (data / name).is_file():
            return data / name
    raise UserError(
        f"{data} has no {names[0]} or {names[1]} for {benchmark.title}: put the file there, one "
        "object a line with id, question and answer, or leave the benchmark out"
    )
