"""`hacrl eval` and `hacrl export`: a run's checkpoints or any model folder, put to use.

Every set of problems is a name and a list (`problem_sets`): a suite of benchmarks is more of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.policy.policy import Policy
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.files import whole_folder
from hacrl.store.rundir import RunDirectory
from hacrl.study.tables import percent, plain_table
from hacrl.tasks import make_task
from hacrl.training.evaluate import Evaluation, evaluate, write_evaluation
from hacrl.types import Problem
from hacrl.verify import VerifierPool

Report = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One set of weights to evaluate.

    Example: Candidate(agent=AgentConfig(name="wren", ...), step=40, checkpoints=Checkpoints(...))
    """

    agent: AgentConfig
    step: int
    """Steps learned; 0: the start weights."""
    checkpoints: Checkpoints | None = None
    """Where the weights of `step` are; None for the model folder itself."""

    def load(self, config: Config) -> Policy:
        policy = Policy(
            self.agent, device=config.runtime.device, temperature=config.temperature, beta=0.0
        )
        if self.checkpoints is not None:
            policy.restore(self.checkpoints.load(self.step))
        return policy


def candidates_of_run(
    run: RunDirectory,
    config: Config,
    agent: str | None,
    step: int | None,
    best: bool,
    report: Report,
) -> list[Candidate]:
    """The run's agents at their newest whole checkpoint, their best, or that of a step."""
    names = [a.name for a in config.agents if not a.replay]
    if agent is not None and agent not in names:
        raise UserError(f"agent {agent!r} is not in {run.path}; there are {', '.join(names)}")
    wanted = [config.agent(name) for name in names if agent in (None, name)]
    return [_candidate(run, config, a, step, best, report) for a in wanted]


def _candidate(
    run: RunDirectory,
    config: Config,
    agent: AgentConfig,
    step: int | None,
    best: bool,
    report: Report,
) -> Candidate:
    if not agent.learns:
        return Candidate(agent, 0)  # frozen: its model folder is all there is
    checkpoints = Checkpoints(run.checkpoints(agent.name), config.checkpoint.keep)
    stored = checkpoints.steps()
    if not stored:
        raise UserError(
            f"{run.path} has no checkpoint of {agent.name!r} yet; go on with "
            f"`hacrl resume {run.path}`"
        )
    if step is not None:
        chosen: int | None = step
    elif best:
        marked = checkpoints.best()
        if marked is None:
            raise UserError(
                f"{run.path}: no best checkpoint of {agent.name!r} is marked; leave out --best"
            )
        chosen = marked[0]
    else:
        chosen = checkpoints.newest_whole(report)
    if chosen not in stored:
        raise UserError(
            f"{run.path} has no whole checkpoint of {agent.name!r} at step {chosen}; there are "
            f"{', '.join(map(str, stored))}"
        )
    return Candidate(agent, chosen, checkpoints)


def candidate_of_model(model: str, config: Config) -> Candidate:
    """A model folder under the settings of the config's first agent (limits, prompt style)."""
    like = next((a for a in config.agents if not a.replay), None)
    settings = like.model_dump() if like else {}
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(model).name.removeprefix("pocket:")).strip("-._")
    name = name[:64] or "model"
    settings |= {"name": name, "model": model, "learn": False, "lora": None}
    return Candidate(AgentConfig.model_validate(settings), 0)


def problem_sets(config: Config, run: Path) -> dict[str, list[Problem]]:
    """What to evaluate on: the held-out problems of the config."""
    count = config.evaluation.problems
    if not count:
        raise UserError("evaluation.problems = 0: give the number, e.g. evaluation.problems=200")
    return {"held_out": make_task(config.task, config.seed, run).held_out(count)}


def evaluate_candidates(
    config: Config, candidates: Sequence[Candidate], out: Path, base: Path, report: Report
) -> list[tuple[str, Evaluation]]:
    """(set name, result) of every candidate on every set; all replies go to `out`/SET/AGENT."""
    settings = config.evaluation
    sets = problem_sets(config, base)
    results = []
    with VerifierPool(config.verifier) as verifier:
        for candidate in candidates:
            agent = candidate.agent
            policy = candidate.load(config)
            for name, problems in sets.items():
                report(f"{agent.name}: {len(problems)} problems x {settings.samples}")
                result, rollouts = evaluate(
                    policy,
                    problems,
                    verifier,
                    agent=agent.name,
                    step=candidate.step,
                    seed=config.seed,
                    samples=settings.samples,
                    temperature=settings.temperature,
                    prompt_limit=config.prompt_limit(agent),
                    limit=settings.max_response_tokens or config.response_limit(agent),
                )
                write_evaluation(out / name / agent.name, result, rollouts, problems)
                results.append((name, result))
    return results


def evaluation_table(results: Sequence[tuple[str, Evaluation]]) -> Table:
    tasks = sorted({task for _, result in results for task in result.by_task})
    table = plain_table("accuracy in percent with its 95 % interval")
    for name in ("agent", "problems of"):
        table.add_column(name, no_wrap=True)
    columns = ["step", "accuracy", *(tasks if 1 < len(tasks) <= 6 else ()), "tokens", "cut off"]
    for name in columns:
        table.add_column(name, justify="right")
    for name, r in results:
        by_task = [f"{100 * r.by_task[t]:.1f}" if t in r.by_task else "-" for t in tasks]
        table.add_row(
            r.agent,
            f"{name} ({r.score.count if r.score else 0} x {r.samples})",
            str(r.step),
            percent(r.score) if r.score else "-",
            *(by_task if 1 < len(tasks) <= 6 else ()),
            f"{r.reply_tokens:.0f}",
            f"{r.truncated:.0%}",
        )
    return table


def export_agent(
    run: RunDirectory, name: str, folder: Path, step: int | None, best: bool, report: Report
) -> int:
    """Write an agent's checkpoint as an ordinary model folder; returns its step."""
    config = run.config()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give a new folder")
    (candidate,) = candidates_of_run(run, config, name, step, best, report)
    policy = candidate.load(config)
    with whole_folder(folder) as new:
        policy.export(new)
    return candidate.step


def run_suite(
    target: str,
    overrides: Sequence[str],
    *,
    suite: str,
    data: Path | None,
    out: Path | None,
    agent: str | None,
    step: int | None,
    best: bool,
    benchmarks: str,
    problems: int | None,
    samples: str,
    max_tokens: int,
    report: Report,
) -> None:
    """`hacrl eval TARGET --suite NAME`: print the summary that is also written to the folder."""
    from hacrl.study.benchmarks import (
        SuiteSettings,
        contestants_of,
        evaluate_suite,
        find_suite,
        summary_markdown,
    )

    if data is None:
        raise UserError(f"--suite {suite} needs --data DIR, the folder with its benchmark files")
    settings = SuiteSettings(
        benchmarks=tuple(name for name in benchmarks.split(",") if name),
        problems=problems,
        samples=_numbers(samples, "--samples"),
        max_response_tokens=max_tokens,
    )
    found = contestants_of(target, overrides, agent=agent, step=step, best=best, report=report)
    name = Path(target).name.removeprefix("pocket:")
    is_run = (Path(target) / "config.toml").is_file()
    folder = out or (Path(target) / "eval" / suite if is_run else Path("runs") / f"{suite}-{name}")
    result = evaluate_suite(found, find_suite(suite), data, folder, settings, report)
    print(summary_markdown(result))
    print(f"every reply: {folder}")


def _numbers(text: str, option: str) -> dict[str, int]:
    """aime25=8,amc23=4 as a dict."""
    numbers: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if not value.isdigit() or int(value) < 1:
            raise UserError(f"{option} {part!r} is not of the form NAME=NUMBER, e.g. aime25=8")
        numbers[key] = int(value)
    return numbers
