"""Running a suite: benchmark by benchmark for each agent, in chunks, and only what is missing.

A cell that has its result is not run again; of a cell that was cut short only the problems without
all their replies are asked again. Whoever resumes with other settings is told so, never mixed in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.store.files import append_line, read_whole_lines, sweep, write_atomic
from hacrl.study.benchmarks.catalogue import Benchmark, Suite, load_problems
from hacrl.study.benchmarks.cell import CellResult, count_figures
from hacrl.study.benchmarks.summary import SuiteResult, read_cell, write_cell, write_summary
from hacrl.training.attempt import attempt, judge, split_by_length
from hacrl.training.evaluate import EVALUATION, reply_rows
from hacrl.types import Problem
from hacrl.verify import VerifierConfig, VerifierPool

CHUNK_ROUNDS = 4
"""A chunk is so many times what the sampler writes side by side."""

Report = Callable[[str], None]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class SuiteSettings:
    """How a suite is run; the defaults are the paper's, as far as it says.

    Example: SuiteSettings(problems=200, max_response_tokens=1024)
    """

    benchmarks: tuple[str, ...] = ()
    """Which of the suite's; all where empty."""
    problems: int | None = None
    """At most so many of each benchmark: a fixed sample of the larger ones."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Another k for some benchmarks, e.g. {"aime25": 8}."""
    temperature: float | None = None
    """0 is greedy. None: greedy where k is 1, temperature 1 where a problem has several replies. (The
    paper does not say; the authors' later code validates greedily.)"""
    max_response_tokens: int = 8196
    """Longest reply; less where prompt and reply would not fit the model's context."""
    max_prompt_tokens: int = 4096
    """A longer prompt is not attempted, and counts as not solved."""
    prompt: str | None = None
    """Another template of the user's message than the suite's."""
    seed: int = 0
    """Of the samples of problems and of the replies' noise."""
    verifier: VerifierConfig = field(default_factory=lambda: VerifierConfig(kind="math"))
    chunk_replies: int | None = None
    """Replies written to disk at a time; four times the agent's sampler_rows where absent."""


@dataclass(frozen=True)
class Contestant:
    """An agent to evaluate. Its weights are loaded only if some cell of it is missing.

    Example: Contestant(AgentConfig(name="wren", model="pocket:wren"), load=lambda: policy, step=40)
    """

    agent: AgentConfig
    load: Callable[[], Policy]
    step: int = 0
    """Steps learned, for the record."""


@dataclass(frozen=True)
class _Cell:
    """One (benchmark, agent): where it lies and what is asked."""

    folder: Path
    benchmark: Benchmark
    problems: Sequence[Problem]
    samples: int
    temperature: float
    settings: Mapping[str, Any]
    """What a result must have been made with to count as this cell's."""

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def partial(self) -> Path:
        return self.folder / "replies.partial.jsonl"


def evaluate_suite(
    contestants: Sequence[Contestant],
    suite: Suite,
    data: Path,
    out: Path,
    settings: SuiteSettings | None = None,
    report: Report = lambda text: None,
) -> SuiteResult:
    """Evaluate every agent alone on every benchmark and write `out` (see the package's docstring)."""
    settings = settings or SuiteSettings()
    _check_names(contestants)
    cells = {
        c.agent.name: list(_cells(c, suite, data, out, settings)) for c in contestants
    }  # all data read and all settings compared before the first model is loaded
    sweep(out)
    with ExitStack() as stack:
        verifier: VerifierPool | None = None
        for contestant in contestants:
            missing = [cell for cell in cells[contestant.agent.name] if not cell.finished]
            if not missing:
                report(f"{contestant.agent.name}: all cells are there already")
                continue
            if verifier is None:
                verifier = stack.enter_context(VerifierPool(settings.verifier))
            policy = contestant.load()
            for cell in missing:
                _run(cell, policy, verifier, settings, report)
            del policy  # the next agent may need the memory
    result = SuiteResult(suite.name, tuple(_side_by_side(list(cells.values()))))
    write_summary(out, result)
    return result


def _side_by_side(by_agent: Sequence[Sequence[_Cell]]) -> Iterator[CellResult]:
    """Benchmark by benchmark: the agents of this call, then those that were evaluated into the same
    folder before, on the same problems in the same way."""
    for cells in zip(*by_agent, strict=True):
        for cell in cells:
            yield read_cell(cell.folder)
        folder = cells[0].folder.parent
        wanted = _shared(cells[0].settings)
        for path in sorted(folder.glob("*/result.json")):
            if path.parent not in [cell.folder for cell in cells]:
                found = read_cell(path.parent)
                if _shared(found.settings) == wanted:
                    yield found


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for two agents to be compared."""
    own = ("model", "step", "system", "template", "template_args", "reply_start")
    return {k: v for k, v in json.loads(json.dumps(dict(settings))).items() if k not in own}


# ---------------------------------------------------------------- what is to be done


def _check_names(contestants: Sequence[Contestant]) -> None:
    names = [c.agent.name for c in contestants]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UserError(f"two agents are called {twice[0]!r}; evaluate them into two folders")


def _cells(
    contestant: Contestant, suite: Suite, data: Path, out: Path, settings: SuiteSettings
) -> Iterator[_Cell]:
    suite.choose(tuple(settings.samples))  # an unknown name is an error
    for benchmark in suite.choose(settings.benchmarks):
        samples = settings.samples.get(benchmark.name, benchmark.samples)
        temperature = settings.temperature
        if temperature is None:
            temperature = 0.0 if samples == 1 else 1.0
        if temperature == 0 and samples > 1:
            raise UserError(
                f"{benchmark.title}: temperature 0 gives {samples} equal replies; set a temperature "
                f"above 0, or 1 sample for {benchmark.name}"
            )
        prompt = settings.prompt or suite.prompt
        problems = load_problems(benchmark, data, prompt, settings.problems, settings.seed)
        cell = _Cell(
            out / benchmark.name / contestant.agent.name,
            benchmark,
            problems,
            samples,
            temperature,
            {
                "model": contestant.agent.model,
                "step": contestant.step,
                "system": contestant.agent.system,
                "template": contestant.agent.template,
                "template_args": contestant.agent.template_args,
                "reply_start": contestant.agent.reply_start,
                "prompt": prompt,
                "problems": len(problems),
                "problems_sha256": _fingerprint(problems),
                "samples": samples,
                "temperature": temperature,
                "max_response_tokens": settings.max_response_tokens,
                "max_prompt_tokens": settings.max_prompt_tokens,
                "seed": settings.seed,
                "verifier": settings.verifier.kind,
                "verifier_options": settings.verifier.options,
            },
        )
        _check_settings(cell)
        yield cell


def _fingerprint(problems: Sequence[Problem]) -> str:
    content = [(p.id, p.messages[-1].content, p.answer) for p in problems]
    return sha256(json.dumps(content).encode()).hexdigest()


def _check_settings(cell: _Cell) -> None:
    """What lies there must be the same evaluation."""
    path = cell.folder / "settings.json"
    if not path.is_file():
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(cell.settings))
    for key in wanted:
        if there.get(key) != wanted[key]:
            raise UserError(
                f"{cell.folder} holds an evaluation with {key} = {there.get(key)!r}, and "
                f"{wanted[key]!r} is asked for now: give another folder with --out, or delete that "
                "one"
            )


# ---------------------------------------------------------------- doing it


def _run(
    cell: _Cell, policy: Policy, verifier: VerifierPool, settings: SuiteSettings, report: Report
) -> None:
    agent, title = policy.agent.name, f"{policy.agent.name}, {cell.benchmark.title}"
    write_atomic(cell.folder / "settings.json", json.dumps(dict(cell.settings), indent=2) + "\n")
    context = _context(policy)
    longest = min(settings.max_prompt_tokens, context - 1)
    prompts, too_long = split_by_length(policy, cell.problems, longest)
    limits = {
        p: min(settings.max_response_tokens, context - len(ids)) for p, ids in prompts.items()
    }
    rows = _stored(cell)
    waiting = [p for p in cell.problems if p.id in prompts and p.id not in rows]
    chunk = settings.chunk_replies or CHUNK_ROUNDS * policy.agent.sampler_rows
    size = max(1, chunk // cell.samples)
    report(f"{title}: {len(waiting)} of {len(cell.problems)} problems x {cell.samples} to do")
    for first in range(0, len(waiting), size):
        problems = waiting[first : first + size]
        begun = time.perf_counter()
        rollouts = attempt(
            policy,
            {p.id: prompts[p.id] for p in problems},
            step=cell.settings["step"],
            samples=cell.samples,
            key=lambda p, i: stream_key(settings.seed, agent, EVALUATION, p, i),
            temperature=cell.temperature,
            limit=limits,
        )
        sampled = time.perf_counter()
        rollouts = judge(rollouts, problems, verifier, policy.agent.reply_start)
        new = reply_rows(rollouts, problems, cell.samples)
        for row in new:
            append_line(cell.partial, json.dumps(row))
        for row in new:
            rows.setdefault(row["problem"], []).append(row)
        times = {
            "benchmark": cell.benchmark.name,
            "agent": agent,
            "replies": len(new),
            "tokens": sum(row["tokens"] for row in new),
            "sampling": sampled - begun,
            "judging": time.perf_counter() - sampled,
        }
        append_line(cell.folder.parent.parent / "times.jsonl", json.dumps(times))
        report(f"{title}: {first + len(problems)} of {len(waiting)} problems done")
    for row in reply_rows([], too_long, cell.samples):
        rows.setdefault(row["problem"], []).append(row)
    _finish(cell, agent, [row for p in cell.problems for row in rows[p.id]], verifier.label)


def _finish(cell: _Cell, agent: str, rows: Rows, verifier: str) -> None:
    """replies.jsonl, then result.json, then away with the partial file."""
    figures = count_figures(rows)
    write_atomic(cell.folder / "replies.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    headline = cell.benchmark.headline
    score = figures.headline(headline)
    write_cell(
        cell.folder,
        CellResult(
            cell.benchmark.name,
            cell.benchmark.title,
            agent,
            headline,
            score,
            figures,
            cell.settings,
            verifier,
        ),
    )
    cell.partial.unlink(missing_ok=True)


def _stored(cell: _Cell) -> dict[str, Rows]:
    """Rows of the problems that an earlier, broken-off run answered in full."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for line in read_whole_lines(cell.partial):
        row = json.loads(line)
        rows.setdefault(row["problem"], {}).setdefault(row["index"], row)
    return {
        problem: [found[i] for i in range(cell.samples)]
        for problem, found in rows.items()
        if len(found) == cell.samples
    }


def _context(policy: Policy) -> int:
    """Tokens that the model has positions for."""
    config = policy.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return int(positions) if positions else 1 << 30
