"""Show training rollouts: each reply with its reward, and what a learner's updates did with it.

The pool holds every reply with its verdict. samples/LEARNER/step-*.jsonl holds advantage, weight and
ratio of each training sample. Both are joined here by (problem, author, index). Steps count from 1
for people and from 0 in files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.replies import FIRST_FAILURE, failure_text
from hacrl.store.pool import Pool
from hacrl.store.reader import RunReader
from hacrl.study.tables import plain_table
from hacrl.types import Group, Problem, Trajectory
from hacrl.verify.protocol import count_statuses, first_failure


@dataclass(frozen=True)
class StepSamples:
    """The rollouts of one step, and what each learner's updates did with them."""

    step: int  # from 0
    groups: Sequence[Group]
    learners: Mapping[str, Mapping[tuple[str, str, int], Mapping[str, Any]]]
    """Learner -> (problem, author, index) -> the row of the sample."""
    problems: Mapping[str, Problem]  # empty if the task's data cannot be read
    failures: str  # what the verifier did with replies that are not judged; "" if all were


def find_samples(
    run: RunReader,
    step: int | None,
    agent: str | None,
    problem: str | None,
    report: Callable[[str], None],
) -> StepSamples:
    """The rollouts of a step (counted from 1; default: the last), of one learner or problem."""
    config = run.config()
    at = _stored_step(run, step)
    learners = {
        name: {(r["problem"], r["source"], r["index"]): r for r in run.sample_rows(at, name)}
        for name in _learners(config, agent)
    }
    groups = Pool(run.pool_path, read_only=True).snapshot(at).groups
    chosen = [group for group in groups if problem in (None, group.problem_id)]
    if not chosen:
        ids = ", ".join(group.problem_id for group in groups[:3])
        raise UserError(f"--problem {problem!r} is not a problem of step {at + 1}, e.g. {ids}")
    failures = _failures(groups, config.verifier.kind)
    return StepSamples(at, chosen, learners, _problems(config, run, at, report), failures)


def print_samples(console: Console, found: StepSamples, limit: int, full: bool = False) -> None:
    """Print one table per problem and learner, up to `limit` rows."""
    if found.failures:
        console.print(f"step {found.step + 1}: {found.failures}")
    shown = 0
    for group in found.groups:
        for name, samples in found.learners.items():
            if shown >= limit:
                console.print(f"... more with --limit (now {limit}), --problem, --agent or --step")
                return
            title = f"step {found.step + 1}, problem {group.problem_id}, learner {name}"
            question = None
            if problem := found.problems.get(group.problem_id):
                asked = one_line(problem.messages[-1].content)
                question = f"question: {asked if full else asked[:200]}   answer: {problem.answer}"
            replies = group.trajectories[: limit - shown]
            console.print(_table(title, question, replies, samples, full))
            console.print()
            shown += len(group.trajectories)


def as_json(found: StepSamples) -> list[dict[str, Any]]:
    """One row per rollout, for `hacrl samples --json`; `learners` has the row of each learner."""
    return [
        {
            "step": found.step + 1,
            "problem": t.problem_id,
            "question": p.messages[-1].content if (p := found.problems.get(t.problem_id)) else None,
            "answer": p.answer if p else None,
            "author": t.agent,
            "index": t.index,
            "status": t.verdict.status.value if t.verdict else None,
            "reward": t.reward if t.judged else None,
            "tokens": t.num_tokens,
            "text": t.reply_start + t.text,
            "learners": {
                name: rows.get((t.problem_id, t.agent, t.index))
                for name, rows in found.learners.items()
            },
        }
        for group in found.groups
        for t in group.trajectories
    ]


def _failures(groups: Sequence[Group], verifier_kind: str) -> str:
    """How many replies of a step were not judged, and why; "" if all were."""
    verdicts = [t.verdict for group in groups for t in group.trajectories if t.verdict]
    row = {f"verdict/{status}": n for status, n in count_statuses(verdicts).items()}
    first = first_failure(verdicts)
    return failure_text({**row, FIRST_FAILURE: first}, verifier_kind) if first else ""


def _stored_step(run: RunReader, step: int | None) -> int:
    """The step to show, counted from 0."""
    steps = run.sample_steps()
    if not steps:
        raise UserError(
            f"{run.path} has no stored samples: no step is finished yet, or the run had "
            "log.samples = false"
        )
    if step is not None and step - 1 not in steps:
        raise UserError(
            f"--step {step}: the run has samples of steps {steps[0] + 1} to {steps[-1] + 1}"
        )
    return steps[-1] if step is None else step - 1


def _learners(config: Config, agent: str | None) -> list[str]:
    learners = [a.name for a in config.agents if a.learns]
    if agent in (None, *learners):
        return [agent] if agent else learners
    reason = "does not train" if agent in [a.name for a in config.agents] else "is not in the run"
    raise UserError(f"--agent {agent!r} {reason}; the learners are {', '.join(learners)}")


def _problems(
    config: Config, run: RunReader, step: int, report: Callable[[str], None]
) -> dict[str, Problem]:
    """The step's problems by id; empty, with a note, if the task's data cannot be read."""
    from hacrl.fingerprint import problems_changed
    from hacrl.tasks import make_task

    try:
        task = make_task(config.task, config.seed, run.path)
        if problems_changed(run, config, task):
            report("questions are not shown: the data has changed since the run was trained")
            return {}
        return {p.id: p for p in task.batch(step, config.problems_per_step)}
    except UserError as error:
        report(f"questions are not shown: {error}")
        return {}


def _table(
    title: str,
    question: str | None,
    replies: Sequence[Trajectory],
    samples: Mapping[tuple[str, str, int], Mapping[str, Any]],
    full: bool,
) -> Table:
    columns = ("#", "reward", "tokens", "ratio", "advantage", "weight", "used")
    table = plain_table(title, ["author"], columns, question)
    table.add_column("reply", ratio=1, overflow="fold" if full else "ellipsis", no_wrap=not full)
    for t in replies:
        sample = samples.get((t.problem_id, t.agent, t.index))
        numbers = ["-", "-", "-", "dropped"]  # the learner's updates did not contain the reply
        if sample is not None:
            numbers = [
                "-" if sample["ratio"] is None else f"{sample['ratio']:.4f}",  # advantage 0
                f"{sample['advantage']:+.2f}",
                f"{sample['weight']:.2f}",
                "yes" if sample["used"] and sample["advantage"] else "no",
            ]
        status = t.verdict.status.value if t.verdict else "-"
        reward = f"{t.reward:g}" if t.judged else status
        reply = t.reply_start + t.text
        text = reply if full else one_line(reply)
        table.add_row(t.agent, str(t.index), reward, str(t.num_tokens), *numbers, text)
    return table


def one_line(text: str) -> str:
    """The text with line breaks shown as ⏎."""
    return " ⏎ ".join(text.splitlines())
