"""Evaluate agents on benchmarks, in chunks, and only what is missing.

A finished benchmark is not run again. Of an interrupted one, only the problems without all their
replies are asked again. Other settings in the same folder are refused.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.policy.policy import Policy
from hacrl.replies import Row
from hacrl.store.files import sweep, to_json
from hacrl.store.rows import RowLog, append_line, read_object, write_object, write_rows
from hacrl.study.benchmarks.catalogue import (
    PROMPT,
    Benchmark,
    choose_benchmarks,
    load_problems,
)
from hacrl.study.benchmarks.results import (
    REPEAT,
    BenchmarkResult,
    Summary,
    count_headline,
    read_result,
    write_summary,
)
from hacrl.study.evaluation import Candidate, find_candidates, output_folder
from hacrl.training.evaluate import ask
from hacrl.types import Problem
from hacrl.verify import VerifierConfig, VerifierPool

CHUNK_ROUNDS = 4  # replies are written to disk after this many times the agent's sampler_rows

Report = Callable[[str], None]

OF_AGENT = ("model", "step", "system", "template", "template_args", "reply_start")
"""Settings in which agents may differ and still be compared."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """How benchmarks are run. The defaults follow arXiv 2603.02604 as far as it says.

    Example: BenchmarkSettings(problems=200, max_response_tokens=1024)
    """

    problems: int | None = None
    """Most problems of each benchmark: a fixed sample of the larger ones."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Replies per problem of some benchmarks, e.g. {"aime25": 8}."""
    temperature: float | None = None
    """0 is greedy. None: greedy with one reply per problem, else 1. (The paper does not say; the
    authors' later code validates greedily.)"""
    max_response_tokens: int = 8196
    """Longest reply; shorter where prompt and reply would not fit the model's context."""
    max_prompt_tokens: int = 4096
    """A problem with a longer prompt is not attempted and counts as not solved."""
    prompt: str = PROMPT  # template of the user's message
    seed: int = 0  # seed of the samples of problems and of the sampling noise
    verifier: VerifierConfig = field(default_factory=lambda: VerifierConfig(kind="math"))


@dataclass(frozen=True)
class _Job:
    """One agent on one benchmark."""

    folder: Path
    benchmark: Benchmark
    problems: Sequence[Problem]
    samples: int
    temperature: float
    settings: Mapping[str, Any]
    """settings.json: what a result in the folder must have been made with."""

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def partial(self) -> Path:
        return self.folder / "replies.partial.jsonl"


def evaluate_benchmarks(
    candidates: Sequence[Candidate],
    benchmarks: Sequence[Benchmark],
    data: Path,
    out: Path,
    settings: BenchmarkSettings | None = None,
    report: Report = lambda text: None,
) -> Summary:
    """Evaluate every agent alone on every benchmark and write `out` (see the package docstring)."""
    settings = settings or BenchmarkSettings()
    names, known = [c.agent.name for c in candidates], [b.name for b in benchmarks]
    if len(set(names)) < len(names):
        raise UserError(f"two of the agents {names} have the same name; give each its own --out")
    if other := set(settings.samples) - set(known):
        raise UserError(f"samples: {min(other)!r} is not one of the benchmarks {', '.join(known)}")
    # Read all data and compare all settings before the first model is loaded.
    jobs = {c.agent.name: [_job(c, b, data, out, settings) for b in benchmarks] for c in candidates}
    sweep(out)
    with ExitStack() as stack:
        verifier: VerifierPool | None = None
        for candidate in candidates:
            missing = [job for job in jobs[candidate.agent.name] if not job.finished]
            if not missing:
                report(f"{candidate.agent.name}: all benchmarks are finished already")
                continue
            verifier = verifier or stack.enter_context(VerifierPool(settings.verifier))
            policy = candidate.load()
            for job in missing:
                _run(job, policy, verifier, settings, report)
            del policy  # free the memory for the next agent
    summary = Summary(tuple(_side_by_side(list(jobs.values()))))
    write_summary(out, summary)
    return summary


def evaluate_target(
    target: str,
    overrides: Sequence[str],
    names: str,
    data: Path | None,
    out: Path | None,
    settings: BenchmarkSettings,
    **chosen: Any,
) -> tuple[Summary, Path]:
    """`hacrl eval TARGET --benchmarks NAMES`: the summary and its folder. `chosen`: agent, step,
    best and report, as in find_candidates."""
    if data is None:
        raise UserError("--benchmarks needs --data DIR, the folder with the data files")
    benchmarks = choose_benchmarks(names)
    candidates = find_candidates(target, overrides, **chosen)
    folder, report = out or output_folder(target, "benchmarks"), chosen["report"]
    return evaluate_benchmarks(candidates, benchmarks, data, folder, settings, report), folder


def _side_by_side(by_agent: Sequence[Sequence[_Job]]) -> Iterator[BenchmarkResult]:
    """Benchmark by benchmark: the agents of this call, then agents that earlier calls evaluated into
    the same folder with the same settings."""
    for jobs in zip(*by_agent, strict=True):
        folders = [job.folder for job in jobs]
        yield from map(read_result, folders)
        for path in sorted(folders[0].parent.glob("*/result.json")):
            if path.parent not in folders:
                found = read_result(path.parent)
                if _comparable(found.settings) == _comparable(jobs[0].settings):
                    yield found


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must be equal for two agents to be compared."""
    return {k: v for k, v in settings.items() if k not in OF_AGENT}


def _job(
    candidate: Candidate, benchmark: Benchmark, data: Path, out: Path, settings: BenchmarkSettings
) -> _Job:
    """Read the problems. A UserError if the folder holds a result with other settings."""
    samples = settings.samples.get(benchmark.name, benchmark.samples)
    temperature = settings.temperature
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if temperature == 0 and samples > 1:
        raise UserError(
            f"{benchmark.title}: temperature 0 gives {samples} equal replies; set a temperature "
            f"above 0, or 1 sample for {benchmark.name}"
        )
    problems = load_problems(benchmark, data, settings.prompt, settings.problems, settings.seed)
    content = [(p.id, p.messages[-1].content, p.answer) for p in problems]
    agent = candidate.agent
    wanted = {
        "model": agent.model,
        "step": candidate.step,
        **agent.model_dump(include=set(OF_AGENT[2:])),
        "prompt": settings.prompt,
        "problems": len(problems),
        "problems_sha256": sha256(json.dumps(content).encode()).hexdigest(),
        "samples": samples,
        "temperature": temperature,
        "max_response_tokens": settings.max_response_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "seed": settings.seed,
        "verifier": settings.verifier.kind,
        "verifier_options": settings.verifier.options,
    }
    wanted = json.loads(json.dumps(wanted))  # as it comes back from settings.json
    folder = out / benchmark.name / agent.name
    if (path := folder / "settings.json").is_file():
        stored = read_object(path, REPEAT)
        for key, value in wanted.items():
            if stored.get(key) != value:
                raise UserError(
                    f"{folder} holds an evaluation with {key} = {stored.get(key)!r}; this one has "
                    f"{value!r}. Give another folder with --out, or delete that one"
                )
    return _Job(folder, benchmark, problems, samples, temperature, wanted)


def _run(
    job: _Job, policy: Policy, verifier: VerifierPool, settings: BenchmarkSettings, report: Report
) -> None:
    """Ask the problems that are missing, then write replies.jsonl and result.json."""
    agent, title = policy.agent.name, f"{policy.agent.name}, {job.benchmark.title}"
    write_object(job.folder / "settings.json", job.settings, indent=2)
    partial = RowLog(job.partial, REPEAT)
    rows = _stored(job, partial)
    waiting = [p for p in job.problems if p.id not in rows]
    size = max(1, CHUNK_ROUNDS * policy.agent.sampler_rows // job.samples)
    report(f"{title}: {len(waiting)} of {len(job.problems)} problems x {job.samples} to do")
    for first in range(0, len(waiting), size):
        problems = waiting[first : first + size]
        begin = time.perf_counter()
        new = ask(
            policy,
            problems,
            verifier,
            seed=settings.seed,
            samples=job.samples,
            temperature=job.temperature,
            prompt_limit=settings.max_prompt_tokens,
            limit=settings.max_response_tokens,
        )
        for row in new:
            partial.add(row)
            rows.setdefault(row["problem"], []).append(row)
        times = {
            "benchmark": job.benchmark.name,
            "agent": agent,
            "replies": sum(row["status"] is not None for row in new),
            "tokens": sum(row["tokens"] for row in new),
            "seconds": time.perf_counter() - begin,
        }
        append_line(job.folder.parent.parent / "times.jsonl", to_json(times))
        report(f"{title}: {first + len(problems)} of {len(waiting)} problems done")
    replies = [row for p in job.problems for row in rows[p.id]]
    figures, score = count_headline(replies, job.benchmark.headline)
    write_rows(job.folder / "replies.jsonl", replies)
    b = job.benchmark
    result = BenchmarkResult(
        b.name, b.title, agent, b.headline, score, figures, job.settings, verifier.label
    )
    write_object(job.folder / "result.json", asdict(result), indent=2)
    job.partial.unlink(missing_ok=True)


def _stored(job: _Job, partial: RowLog) -> dict[str, list[Row]]:
    """Rows of the problems that an interrupted evaluation has answered completely."""
    rows: dict[str, dict[int, Row]] = {}
    found, error = partial.read()
    if error:
        raise error
    for row in found:
        rows.setdefault(row["problem"], {}).setdefault(row["index"], row)
    return {
        problem: [replies[i] for i in range(job.samples)]
        for problem, replies in rows.items()
        if len(replies) == job.samples
    }
