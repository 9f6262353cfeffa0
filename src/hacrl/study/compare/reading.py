"""One agent of one finished run, up to the evaluation that the report uses."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.errors import UserError
from hacrl.replies import failure_text, judged_counts
from hacrl.study.compare.suite import Run
from hacrl.study.diagnostics.baseline import CHECKED

SHOWN = re.compile(
    r"peers/(used|below_floor|above_one)|own/(clipped|advantage_zero)|grad_norm|reply_tokens"
    r"|(ratio|weight)/[^/]+"
)
"""Metrics of a step that the report shows, if the run has them."""
CHECKS = re.compile("diagnostics/.+")


@dataclass(frozen=True)
class Point:
    """An evaluation of one agent.

    Example: Point(step=6, rollouts=1536, seconds=9.2, accuracy=0.41)
    """

    step: int
    rollouts: int  # own rollouts drawn so far
    seconds: float  # training seconds of the whole team so far, without evaluation and checkpoints
    accuracy: float
    judged: tuple[int, int] = (0, 0)  # replies that were judged and that were not


@dataclass(frozen=True)
class AgentRun:
    """One agent of one finished run."""

    run: Run
    agent: str
    curve: tuple[Point, ...]
    scores: Mapping[str, float]  # problem id -> mean reward of its replies, at the last point
    updates: int
    metrics: Mapping[str, float]  # means over the steps, see `mean_metrics`
    checks: tuple[Mapping[str, Any], ...] = ()  # metrics rows of the steps with a theory check
    failure: str = ""
    """What the verifier did with the replies that are not judged at the last point."""

    @property
    def last(self) -> Point:
        return self.curve[-1]

    @property
    def folder(self) -> Path:
        """The evaluation folder with the replies behind `scores`."""
        return self.run.reader.evaluation(self.last.step, self.agent)


def read_run(run: Run) -> list[AgentRun]:
    """Every learner of a finished run. Under dynamic sampling steps differ in their rollouts: then up to
    the last evaluation of each agent within the budget of the run."""
    if run.stored is not None:
        return list(run.stored)
    config = run.config
    return [
        _read_agent(run, a.name, config.steps * config.prompts_per_step * config.samples_of(a))
        for a in config.agents
        if a.name in run.learners
    ]


def _read_agent(run: Run, agent: str, budget: int) -> AgentRun:
    reader = run.reader
    train = reader.metric_rows("train", agent)
    seconds = reader.training_seconds()
    evaluations = {row["step"]: row for row in reader.metric_rows("evaluation", agent)}
    scores = {step: reader.scores(step, agent) for step in sorted(evaluations)}
    if missing := [step for step in scores if not scores[step]]:
        raise UserError(
            f"{run.name}: no reply of {agent} was judged in the evaluation after step {missing[0]}, so "
            f"it has no accuracy. Fix the verifier, delete {run.folder} and repeat the command."
        )
    curve = [
        Point(
            step,
            sum(row["rollouts"] for row in train if row["step"] < step),
            sum(spent for at, spent in seconds.items() if at < step),
            fmean(scores[step].values()),
            judged_counts(evaluations[step]),
        )
        for step in scores
    ]
    if run.config.has_rounds:
        curve = [p for p in curve if p.rollouts <= budget] or curve[:1]
    last = curve[-1].step
    train = [row for row in train if row["step"] < last]
    return AgentRun(
        run,
        agent,
        tuple(curve),
        scores[last],
        sum(row.get("updates", 0) for row in train),
        mean_metrics(train),
        tuple(row for row in train if CHECKED in row),
        failure_text(evaluations[last], run.config.verifier.kind) if curve[-1].judged[1] else "",
    )


def mean_metrics(
    train: Sequence[Mapping[str, Any]], shown: re.Pattern[str] = SHOWN
) -> dict[str, float]:
    """Means over the steps of the metrics to show. "peers/effective_fraction" is the effective number of
    peers' samples divided by the number that went through the model."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in train:
        for key, value in row.items():
            if value is not None and shown.fullmatch(key):
                found[key].append(value)
        if number := row.get("peers/forwarded"):
            found["peers/effective_fraction"].append(row["peers/effective_samples"] / number)
    return {key: fmean(values) for key, values in sorted(found.items())}
