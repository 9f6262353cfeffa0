"""The known benchmarks, and how their problems are read.

Each benchmark is one file, NAME.jsonl or NAME.jsonl.gz, with one JSON object per line that has `id`,
`question` and `answer`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from hacrl.config import Table
from hacrl.errors import UserError
from hacrl.tasks.dataset import to_problems
from hacrl.tasks.deck import hash_number
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import read_rows
from hacrl.tasks.settings import ColumnsConfig
from hacrl.types import Problem
from hacrl.verify.settings import VerifierConfig

PROMPT = "{question}\nReason step by step and put the final answer in \\boxed{{}}."

Headline = Literal["avg", "best", "drawn"]
"""avg@k, best@k, or best@k as the expected maximum of k draws (hacrl.replies)."""


@dataclass(frozen=True)
class Benchmark:
    """A set of problems and the figure reported for it.

    Example: Benchmark("aime25", "AIME 2025", samples=30, headline="drawn")
    """

    name: str  # also the name of the file, without .jsonl or .jsonl.gz
    title: str
    samples: int = 1  # k: replies to each problem
    headline: Headline = "avg"  # the figure reported


class BenchmarkSettings(Table):
    """How benchmarks are run. The defaults follow arXiv 2603.02604 as far as it says.

    Example: BenchmarkSettings(problems=200, max_response_tokens=1024)
    """

    problems: int | None = Field(None, ge=1)
    """Most problems of each benchmark: a fixed sample of the larger ones."""
    samples: dict[str, int] = Field(default_factory=dict)
    """Replies per problem of some benchmarks, e.g. { aime25 = 8 }."""
    temperature: float | None = Field(None, ge=0)
    """0 is greedy. None: greedy with one reply per problem, else 1. (The paper does not say; the
    authors' later code validates greedily.)"""
    max_response_tokens: int = Field(8196, ge=1)
    """Longest reply; shorter where prompt and reply would not fit the model's context."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """A problem with a longer prompt is not attempted and counts as not solved."""
    prompt: str = PROMPT
    """Template of the user's message."""
    seed: int = 0
    """Seed of the samples of problems and of the sampling noise."""
    verifier: VerifierConfig = Field(default_factory=lambda: VerifierConfig(kind="math"))
    """Judges the replies."""


MATH7 = (
    Benchmark("math500", "MATH-500"),
    Benchmark("math_test", "MATH"),
    Benchmark("gsm8k_test", "GSM8K"),
    Benchmark("aime25", "AIME 2025", samples=30, headline="drawn"),
    Benchmark("amc23", "AMC 23"),
    Benchmark("minerva", "Minerva"),
    Benchmark("olympiadbench", "OlympiadBench"),
)
"""The seven benchmarks of arXiv 2603.02604, appendix A: best@30 on AIME 2025, avg@1
elsewhere. The paper's best@30 are not multiples of 1/30, so they are expected maxima, as in verl."""


def choose_benchmarks(names: str) -> tuple[Benchmark, ...]:
    """math7, or some of its benchmarks with commas, in the order of math7.

    Example: choose_benchmarks("aime25,math500")
    """
    known = [b.name for b in MATH7]
    chosen = known if names == "math7" else names.split(",")
    for name in chosen:
        if name not in known:
            raise UserError(
                f"benchmark {name!r} is unknown; there are math7 (all), {', '.join(known)}"
            )
    return tuple(b for b in MATH7 if b.name in chosen)


def load_problems(
    benchmark: Benchmark, data: Path, prompt: str = PROMPT, most: int | None = None, seed: int = 0
) -> list[Problem]:
    """The problems of a benchmark, in the order of the file, at most `most` of them.

    The sample is chosen by a hash of (seed, id): it is the same on every machine, and a smaller
    sample is a part of a larger one.
    """
    path = _file(benchmark, data)
    template = PromptTemplate(prompt, "prompt")
    problems = to_problems(
        read_rows(path), ColumnsConfig(), template, benchmark.name, benchmark.name
    )
    if most is None or most >= len(problems):
        return problems
    # "suite" is part of the hash: another word would choose other problems.
    chosen = sorted(problems, key=lambda p: (hash_number("suite", seed, p.id), p.id))[:most]
    kept = {p.id for p in chosen}
    return [p for p in problems if p.id in kept]


def _file(benchmark: Benchmark, data: Path) -> Path:
    names = [f"{benchmark.name}.jsonl", f"{benchmark.name}.jsonl.gz"]
    if found := [data / name for name in names if (data / name).is_file()]:
        return found[0]
    raise UserError(
        f"{data} has no {' or '.join(names)} for {benchmark.title}: fetch it with `hacrl data fetch "
        f"{benchmark.name} --out {data}`, or leave the benchmark out"
    )
