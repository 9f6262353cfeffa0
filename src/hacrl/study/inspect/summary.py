"""Summary of a run: the numbers behind `hacrl show`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.config import AgentConfig, Config
from hacrl.replies import judged_counts
from hacrl.statistics import Estimate, compare_paired
from hacrl.store.reader import RunReader

Curve = list[tuple[int, float]]  # (steps done, value)

EDGE = 5  # steps in the mean reward of the "first" and of the "last" steps; a single step is noisy


@dataclass(frozen=True)
class Score:
    """A held-out result.

    Example: Score(step=40, accuracy=Estimate(0.61, 0.57, 0.65, 300))
    """

    step: int
    accuracy: Estimate
    judged: tuple[int, int] = (0, 0)  # replies that were judged and that were not


@dataclass(frozen=True)
class AgentSummary:
    """One agent of a run.

    Example: AgentSummary(name="wren", learns=True, scores=(Score(...), ...), rollouts=10240,
             gain=Estimate(0.2, 0.15, 0.25, 300), rewards=[(1, 0.2), ...], updates=240,
             peers_used=0.4, seconds=70.1)
    """

    name: str
    learns: bool
    scores: tuple[Score, ...]  # every evaluation, by step
    gain: Estimate | None
    """Last minus first evaluation, paired by problem; None without two evaluations."""
    rewards: Curve
    rollouts: int
    updates: int
    peers_used: float | None
    """Fraction of peers' samples with a gradient after clipping; None if there were none."""
    seconds: float
    prompts: int = 0  # training prompts it was given
    too_long: int = 0  # those of them that were longer than max_prompt_tokens

    @property
    def before(self) -> Score | None:
        return self.scores[0] if self.scores and self.scores[0].step == 0 else None

    @property
    def after(self) -> Score | None:
        return self.scores[-1] if self.scores and self.scores[-1].step else None

    @property
    def best(self) -> Score | None:
        """The best score, also of step 0; the first of equals."""
        return max(self.scores, key=lambda s: s.accuracy.mean, default=None)

    @property
    def reward_edges(self) -> tuple[float, float] | None:
        """Mean reward of the first and of the last few steps."""
        values, edge = [value for _, value in self.rewards], self.edge
        return (fmean(values[:edge]), fmean(values[-edge:])) if values else None

    @property
    def edge(self) -> int:
        """Number of steps in each mean of `reward_edges`."""
        return max(1, min(EDGE, len(self.rewards) // 2))


@dataclass(frozen=True)
class RunSummary:
    """A run up to its last finished step."""

    path: Path
    config: Config
    steps_done: int
    state: str  # of RunReader.state
    agents: tuple[AgentSummary, ...]
    notes: tuple[tuple[int, str], ...] = ()
    """(steps done, text) of every note that was shown while the run trained."""


def summarise(run: RunReader) -> RunSummary:
    """Read a run's metrics, times and evaluations."""
    config = run.config()
    agents = tuple(_agent(run, agent, config.problems_per_step) for agent in config.agents)
    notes = tuple((row["step"], row["text"]) for row in run.notes())
    done = run.steps_done()
    if run.config_changed():
        notes += ((done, f"{run.config_path} was edited after hacrl wrote it."),)
    return RunSummary(run.path, config, done, run.state(), agents, notes)


def as_json(summary: RunSummary) -> dict[str, Any]:
    """All figures as plain data, for `hacrl show --json`."""
    config = summary.config
    plain = asdict(summary) | {"path": str(summary.path), "steps": config.steps}
    del plain["config"]
    return plain | {"algorithm": config.algorithm.name}


def _agent(run: RunReader, agent: AgentConfig, prompts: int) -> AgentSummary:
    train = run.metric_rows("train", agent.name)
    scores = scores_of(run, agent.name)
    gain = None
    if len(scores) > 1:
        first, last = (run.scores(scores[i].step, agent.name) for i in (0, -1))
        gain = compare_paired(first, last) if first.keys() & last.keys() else None
    return AgentSummary(
        name=agent.name,
        learns=agent.learns,
        scores=scores,
        gain=gain,
        rewards=[(r["step"] + 1, r["reward"]) for r in train if r["reward"] is not None],
        rollouts=sum(row["rollouts"] for row in train),
        updates=sum(row.get("updates", 0) for row in train),
        peers_used=peers_used(train),
        seconds=run.seconds(agent.name),
        prompts=prompts * sum(not row.get("absent") for row in train),
        too_long=0 if agent.replay else sum(row.get("not_attempted", 0) for row in train),
    )


def scores_of(run: RunReader, agent: str) -> tuple[Score, ...]:
    """Every evaluation of an agent with a judged reply, by step."""
    rows = sorted(run.metric_rows("evaluation", agent), key=lambda row: int(row["step"]))
    return tuple(
        Score(row["step"], found, judged_counts(row)) for row in rows if (found := estimate_of(row))
    )


def estimate_of(row: Mapping[str, Any]) -> Estimate | None:
    """The accuracy of an evaluation's row in metrics.jsonl; None if no reply was judged."""
    if row["accuracy"] is None:
        return None
    ends = row["accuracy/low"], row["accuracy/high"]
    return Estimate(row["accuracy"], *ends, row.get("problems", 0))


def peers_used(train: Sequence[Mapping[str, Any]]) -> float | None:
    """Over all steps; every peer sample that went through the model counts once."""
    counts = [
        (row["peers/forwarded"], row["peers/used"])
        for row in train
        if row.get("peers/used") is not None
    ]
    total = sum(n for n, _ in counts)
    return sum(n * used for n, used in counts) / total if total else None
