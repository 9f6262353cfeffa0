"""Reading training rollouts: what was written, what it earned, and what each learner made of it.

The pool holds every reply with its verdict; samples/LEARNER/step-*.jsonl holds what a learner's
updates did with it. The two are joined here by (problem, author, index).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.store.reader import RunReader
from hacrl.study.tables import plain_table
from hacrl.types import Problem, Trajectory

Key = tuple[str, str, int]
"""(problem, author, index): a reply of a step."""


@dataclass(frozen=True)
class SampleRow:
    """One reply as one learner saw it.

    Example: SampleRow(step=3, problem="add-17-25", learner="wren", trajectory=...,
             view={"advantage": 0.9, "weight": 1.2, "ratio": 0.93, "used": True, ...})
    """

    step: int
    problem: str
    learner: str
    trajectory: Trajectory
    view: dict[str, Any] | None
    """None when the learner's updates did not hold it (dropped, or nothing was learned)."""


def print_samples(
    console: Console,
    run: RunReader,
    *,
    step: int | None,
    agent: str | None,
    problem: str | None,
    limit: int,
    full: bool = False,
) -> None:
    """One table for each problem and learner, until `limit` rows are shown."""
    config = run.config()
    steps = stored_steps(run)
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"--step {step}: the run has stored steps {steps[0]} to {steps[-1]}")
    learners = _learners(config, agent)
    problems = _problems(config, run, step)
    shown = 0
    for rows in sample_rows(run, config, step, learners, problem):
        if shown >= limit:
            console.print(f"... more with --limit (now {limit}), --problem, --agent or --step")
            return
        console.print(_table(rows[: limit - shown], problems.get(rows[0].problem), full))
        console.print()
        shown += len(rows)
    if not shown:
        raise UserError(
            f"--problem {problem!r} is not one of step {step}; it has e.g. "
            f"{', '.join(list(problems)[:3])}"
        )


def stored_steps(run: RunReader) -> list[int]:
    """Steps with stored samples; a UserError that says why where there are none."""
    steps = run.sample_steps()
    if not steps:
        raise UserError(
            f"{run.path} has no stored samples: no step is done yet, or the run had "
            "log.samples = false"
        )
    return steps


def sample_rows(
    run: RunReader,
    config: Config,
    step: int,
    learners: Sequence[str],
    problem: str | None = None,
) -> Iterator[list[SampleRow]]:
    """The rows of a step, by problem and learner, in a fixed order."""
    groups = Pool(run.pool_path, read_only=True).snapshot(step).groups
    views = {name: _views(run, name, step) for name in learners}
    for group in groups:
        if problem is not None and group.problem_id != problem:
            continue
        for name in learners:
            yield [
                SampleRow(step, group.problem_id, name, t, views[name].get(_key(t)))
                for t in group.trajectories
            ]


def _learners(config: Config, agent: str | None) -> list[str]:
    names = [a.name for a in config.agents]
    if agent is not None and agent not in names:
        raise UserError(f"--agent {agent!r}: the run has {', '.join(names)}")
    return [agent] if agent else [a.name for a in config.agents if a.learns]


def _views(run: RunReader, learner: str, step: int) -> dict[Key, dict[str, Any]]:
    rows = run.sample_rows(step, learner)
    return {(row["problem"], row["source"], row["index"]): row for row in rows}


def _key(t: Trajectory) -> Key:
    return t.problem_id, t.agent, t.index


def _problems(config: Config, run: RunReader, step: int) -> dict[str, Problem]:
    """The step's problems from the task; none where its data is gone."""
    from hacrl.tasks import make_task

    try:
        task = make_task(config.task, config.seed, run.path)
        return {p.id: p for p in task.batch(step, config.prompts_per_step)}
    except UserError:
        return {}


def _table(rows: Sequence[SampleRow], problem: Problem | None, full: bool) -> Table:
    first = rows[0]
    table = plain_table(f"step {first.step}, problem {first.problem}, as {first.learner} learned")
    if problem is not None:
        question = one_line(problem.messages[-1].content)
        question = question if full else question[:200]
        table.caption = escape(f"question: {question}   answer: {problem.answer}")
    table.add_column("author", no_wrap=True)
    for name in ("#", "reward", "tokens", "s", "advantage", "weight", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reply", overflow="fold" if full else "ellipsis", no_wrap=not full)
    for row in rows:
        table.add_row(*_cells(row, full))
    return table


def _cells(row: SampleRow, full: bool) -> list[str]:
    t, view = row.trajectory, row.view
    verdict = t.verdict
    reward = "-" if verdict is None else f"{t.reward:g}" if t.judged else verdict.status.value
    numbers = ["-", "-", "-", "no view"]
    if view is not None:
        numbers = [
            "-" if view["ratio"] is None else f"{view['ratio']:.4f}",  # None: not computed (prune)
            f"{view['advantage']:+.2f}",
            f"{view['weight']:.2f}",
            "yes" if view["used"] and view["advantage"] else "no",
        ]
    reply = t.begun + t.text
    shown = reply if full else one_line(reply)
    return [t.agent, str(t.index), reward, str(t.num_tokens), *numbers, _plain(shown)]


def one_line(text: str) -> str:
    return " ⏎ ".join(text.splitlines())


def _plain(text: str) -> str:
    """Model text is no markup, and control characters must not reach the terminal."""
    return escape("".join(c if c.isprintable() or c == "\n" else "·" for c in text))
