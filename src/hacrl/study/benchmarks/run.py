"""Evaluate agents on benchmarks, in chunks, and only what is missing.

A finished benchmark is not run again. Of an interrupted one, only the problems without all their
replies are asked again. Other settings in the same folder are refused.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hacrl.config_file import first_difference
from hacrl.errors import UserError
from hacrl.policy.policy import Policy
from hacrl.replies import Row
from hacrl.store.files import sweep, to_json
from hacrl.store.rows import RowLog, append_line, read_object, write_object, write_rows
from hacrl.study.benchmarks.catalogue import Benchmark, BenchmarkSettings, load_problems
from hacrl.study.benchmarks.results import (
    REPEAT,
    BenchmarkResult,
    Summary,
    count_headline,
    read_result,
    write_summary,
)
from hacrl.study.evaluation import Candidate
from hacrl.training.evaluate import ask
from hacrl.types import Problem
from hacrl.verify import VerifierPool
from hacrl.verify.settings import builtin_versions

CHUNK_ROUNDS = 4  # replies are written to disk after this many times the agent's sampler_rows

Report = Callable[[str], None]

OF_AGENT = {"system", "template", "template_args", "reply_start"}
"""Settings of an agent that change its replies."""


@dataclass(frozen=True)
class _Job:
    """One agent on one benchmark."""

    folder: Path
    benchmark: Benchmark
    problems: Sequence[Problem]
    settings: Mapping[str, Any]
    """settings.json: what a result in the folder must have been made with."""

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()


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
    if any(not job.finished for same in jobs.values() for job in same):
        with VerifierPool(settings.verifier) as verifier:
            for candidate in candidates:
                if missing := [job for job in jobs[candidate.agent.name] if not job.finished]:
                    policy = candidate.load()
                    for job in missing:
                        _run(job, policy, verifier, settings, report)
                    del policy  # free the memory for the next agent
    by_benchmark = [job for same in zip(*jobs.values(), strict=True) for job in same]
    summary = Summary(tuple(read_result(job.folder) for job in by_benchmark))
    write_summary(out, summary)
    return summary


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
            f"{benchmark.title}: temperature = 0 gives {samples} equal replies. Set samples to 1, or a "
            "temperature above 0"
        )
    problems = load_problems(benchmark, data, settings.prompt, settings.problems, settings.seed)
    content = [(p.id, p.messages[-1].content, p.answer) for p in problems]
    agent = candidate.agent
    wanted = {
        "model": agent.model,
        "step": candidate.step,
        **agent.model_dump(include=OF_AGENT),
        "prompt": settings.prompt,
        "problems": len(problems),
        "problems_sha256": sha256(json.dumps(content).encode()).hexdigest(),
        "samples": samples,
        "figure": benchmark.headline,
        "temperature": temperature,
        "max_response_tokens": settings.max_response_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "seed": settings.seed,
        "verifier": settings.verifier.kind,
        "verifier_options": settings.verifier.options,
        "verifier_versions": builtin_versions(settings.verifier),
    }
    if rewards := settings.verifier.rewards:
        wanted["verifier_rewards"] = [reward.model_dump() for reward in rewards]
    wanted = json.loads(json.dumps(wanted))  # as it comes back from settings.json
    folder = out / benchmark.name / agent.name
    path = folder / "settings.json"
    stored = read_object(path, REPEAT) if path.is_file() else wanted
    if changed := first_difference(stored, wanted):
        raise UserError(
            f"{folder} holds an evaluation with other settings: {changed}. Give another folder with "
            "--out, or delete that one"
        )
    return _Job(folder, benchmark, problems, wanted)


def _run(
    job: _Job, policy: Policy, verifier: VerifierPool, settings: BenchmarkSettings, report: Report
) -> None:
    """Ask the problems that are missing, then write replies.jsonl and result.json."""
    agent, title = policy.agent.name, f"{policy.agent.name}, {job.benchmark.title}"
    write_object(job.folder / "settings.json", job.settings, indent=2)
    path, samples = job.folder / "replies.partial.jsonl", job.settings["samples"]
    partial = RowLog(path, REPEAT)
    rows = _stored(partial, samples)
    waiting = [p for p in job.problems if p.id not in rows]
    size = max(1, CHUNK_ROUNDS * policy.agent.sampler_rows // samples)
    report(f"{title}: {len(waiting)} of {len(job.problems)} problems x {samples} to do")
    for first in range(0, len(waiting), size):
        problems = waiting[first : first + size]
        begin = time.perf_counter()
        new = ask(
            policy,
            problems,
            verifier,
            seed=settings.seed,
            samples=samples,
            temperature=job.settings["temperature"],
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
    path.unlink(missing_ok=True)


def _stored(partial: RowLog, samples: int) -> dict[str, list[Row]]:
    """Rows of the problems that an interrupted evaluation has answered completely."""
    rows: dict[str, dict[int, Row]] = {}
    found, error = partial.read()
    if error:
        raise error
    for row in found:
        rows.setdefault(row["problem"], {}).setdefault(row["index"], row)
    return {
        problem: [replies[i] for i in range(samples)]
        for problem, replies in rows.items()
        if len(replies) == samples
    }
