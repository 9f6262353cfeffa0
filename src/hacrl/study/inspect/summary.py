"""A run read back from its directory: the numbers behind every table and curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.config import AgentConfig, Config
from hacrl.statistics import Estimate, compare_paired
from hacrl.store.reader import RunReader, read_scores
from hacrl.study.diagnostics.harm import CHECKED, find_harm

Curve = list[tuple[int, float]]
"""(steps done, value)."""

EDGE = 5
"""Rewards of single steps are noisy; "first" and "last" are means over so many steps."""


@dataclass(frozen=True)
class Score:
    """A held-out result.

    Example: Score(step=40, accuracy=Estimate(0.61, 0.57, 0.65, 300))
    """

    step: int
    accuracy: Estimate


@dataclass(frozen=True)
class AgentSummary:
    """One agent of a run.

    Example: AgentSummary(name="wren", model="pocket:wren", learns=True, scores=(Score(...), ...),
             gain=Estimate(0.2, 0.15, 0.25, 300), rewards=[(1, 0.2), ...], rollouts=10240,
             updates=240, peers_used=0.4, seconds=70.1)
    """

    name: str
    model: str
    learns: bool
    scores: tuple[Score, ...]
    """Every evaluation, by step."""
    gain: Estimate | None
    """Last minus first evaluation, paired by problem; None without two of them."""
    rewards: Curve
    rollouts: int
    updates: int
    peers_used: float | None
    """Share of peers' samples whose gradient survived the clip; None where there were none."""
    seconds: float

    @property
    def before(self) -> Score | None:
        return self.scores[0] if self.scores and self.scores[0].step == 0 else None

    @property
    def after(self) -> Score | None:
        return self.scores[-1] if self.scores and self.scores[-1].step else None

    @property
    def best(self) -> Score | None:
        """The best after training began; the first of equals."""
        trained = [s for s in self.scores if s.step]
        return max(trained, key=lambda s: s.accuracy.mean) if trained else None

    @property
    def reward_edges(self) -> tuple[float, float] | None:
        """Mean reward of the first and of the last few steps."""
        if not self.rewards:
            return None
        edge = max(1, min(EDGE, len(self.rewards) // 2))
        values = [value for _, value in self.rewards]
        return fmean(values[:edge]), fmean(values[-edge:])

    @property
    def accuracies(self) -> Curve:
        return [(s.step, s.accuracy.mean) for s in self.scores]


@dataclass(frozen=True)
class Checks:
    """What the diagnostics of a run cost and found; in no other figure of the run.

    Example: Checks(count=3, rollouts=6144, seconds=20.5, warnings=("finch hurts wren: ...",))
    """

    count: int
    """Steps with a check."""
    rollouts: int
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class RunSummary:
    """A run as far as it has come."""

    path: Path
    config: Config
    steps_done: int
    agents: tuple[AgentSummary, ...]
    checks: Checks | None = None
    """None where diagnostics were off."""


def summarise(run: RunReader) -> RunSummary:
    """Read a run's metrics, times and evaluations."""
    config = run.config()
    agents = tuple(_agent(run, agent) for agent in config.agents)
    return RunSummary(run.path, config, run.steps_done(), agents, _checks(run, config))


def _checks(run: RunReader, config: Config) -> Checks | None:
    checked = [row for row in run.metrics("train") if CHECKED in row]
    if not checked:
        return None
    return Checks(
        count=len({row["step"] for row in checked}),
        rollouts=sum(row[CHECKED] for row in checked),
        seconds=sum(run.seconds(agent.name, diagnostics=True) for agent in config.agents),
        warnings=tuple(harm.sentence for harm in find_harm(config, checked)),
    )


def _agent(run: RunReader, agent: AgentConfig) -> AgentSummary:
    name = agent.name
    train = run.metrics("train", name)
    scores = tuple(
        Score(row["step"], _accuracy(row))
        for row in sorted(run.metrics("evaluation", name), key=lambda row: row["step"])
        if row["accuracy"] is not None
    )
    return AgentSummary(
        name=name,
        model=agent.model or f"replay of {agent.replay}",
        learns=agent.learns,
        scores=scores,
        gain=_gain(run, name, scores),
        rewards=[(r["step"] + 1, r["reward"]) for r in train if r["reward"] is not None],
        rollouts=sum(row["rollouts"] for row in train),
        updates=sum(row.get("updates", 0) for row in train),
        peers_used=_peers_used(train),
        seconds=run.seconds(name),
    )


def _accuracy(row: Mapping[str, Any]) -> Estimate:
    count = row.get("problems", 0)
    return Estimate(row["accuracy"], row["accuracy/low"], row["accuracy/high"], count)


def _gain(run: RunReader, agent: str, scores: Sequence[Score]) -> Estimate | None:
    if len(scores) < 2:
        return None
    first, last = (run.evaluation(scores[i].step, agent) for i in (0, -1))
    return paired_difference(first, last)


def paired_difference(before: Path, after: Path) -> Estimate | None:
    """Mean of after - before over the problems that both evaluation folders judged.

    The noise of an evaluation does not depend on the weights or the step, so the two replies to a
    problem are drawn alike, and the difference has a narrower interval than two separate means.
    """
    old, new = read_scores(before), read_scores(after)
    return compare_paired(old, new) if old.keys() & new.keys() else None


def _peers_used(train: Sequence[Mapping[str, Any]]) -> float | None:
    """Over all steps, each peer sample that was compared (`prune`) counting once."""
    counts = [
        (row.get("peers/forwarded", row["peers/samples"]), row["peers/used"])
        for row in train
        if row.get("peers/used") is not None
    ]
    total = sum(n for n, _ in counts)
    return sum(n * used for n, used in counts) / total if total else None
