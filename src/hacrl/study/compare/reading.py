"""What one agent did in one finished cell, read from the cell's files: metrics.jsonl, times.jsonl
and the stored held-out replies."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.store.files import read_whole_lines
from hacrl.store.reader import read_scores
from hacrl.study.compare.suite import Cell
from hacrl.study.diagnostics.harm import CHECKED

DIAGNOSTICS = (
    "peers/used",
    "peers/below_floor",
    "peers/above_one",
    "peers/effective_samples",
    "own/clipped",
    "own/advantage_zero",
    "grad_norm",
)
"""Figures of a step that the report shows, as far as the metrics have them."""
FAMILIES = ("ratio/", "weight/", "diagnostics/")
"""And those that begin so and have one name behind: the peers' ratios s and weights by source, and
what an algorithm or agent of one's own measures."""
SOURCES = ("peers/used/", "peers/effective/")
"""And these, for every source."""


@dataclass(frozen=True)
class Point:
    """An evaluation on the way.

    Example: Point(step=6, rollouts=1536, seconds=9.2, accuracy=0.41)
    """

    step: int
    rollouts: int
    """Own rollouts drawn by then."""
    seconds: float
    """Training seconds of the whole team by then, without evaluation and checkpoints."""
    accuracy: float


@dataclass(frozen=True)
class Reading:
    """One agent of one cell, up to the evaluation that counts."""

    cell: Cell
    agent: str
    curve: tuple[Point, ...]
    scores: Mapping[str, float]
    """Problem id -> mean reward of its replies, at the last point."""
    updates: int
    diagnostics: Mapping[str, float]
    """Means over the steps."""
    checks: tuple[Mapping[str, Any], ...] = ()
    """Metrics of the steps with a check of the theory."""
    checking: float = 0.0
    """Seconds of this agent's checks; in no other figure."""

    @property
    def last(self) -> Point:
        return self.curve[-1]

    @property
    def folder(self) -> Path:
        """Where the replies lie that `scores` was counted from."""
        return self.cell.run.evaluation(self.last.step, self.agent)


def read_cell(cell: Cell, within: float | None = None) -> list[Reading]:
    """Every learner of a finished cell. `within`: up to the last evaluation at which training had
    taken no more than so many seconds."""
    rows = cell.run.metrics()
    seconds = training_seconds(cell.folder / "times.jsonl")
    return [_read(cell, agent, rows, seconds, within) for agent in cell.learners]


def _read(
    cell: Cell,
    agent: str,
    rows: Sequence[Mapping[str, Any]],
    seconds: Mapping[int, float],
    within: float | None,
) -> Reading:
    mine = [row for row in rows if row["agent"] == agent]
    train = [row for row in mine if row["kind"] == "train"]
    steps = sorted({row["step"] for row in mine if row["kind"] == "evaluation"})
    scores = {step: read_scores(cell.run.evaluation(step, agent)) for step in steps}
    curve = [
        Point(
            step,
            sum(row["rollouts"] for row in train if row["step"] < step),
            sum(spent for at, spent in seconds.items() if at < step),
            fmean(scores[step].values()) if scores[step] else 0.0,
        )
        for step in steps
    ]
    if within is not None:
        curve = [p for p in curve if p.seconds <= within] or curve[:1]
    last = curve[-1].step
    train = [row for row in train if row["step"] < last]
    updates = sum(row.get("updates", 0) for row in train)
    return Reading(
        cell,
        agent,
        tuple(curve),
        scores[last],
        updates,
        diagnostics(train),
        tuple(row for row in train if CHECKED in row),
        checking_seconds(cell.folder / "times.jsonl", agent, last),
    )


def diagnostics(train: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over the steps of every shown figure; "peers/effective_share" is the effective
    number of peers' samples over that of those that went through the model."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in train:
        for key, value in row.items():
            family = key.startswith(FAMILIES) and key.count("/") == 1
            shown = key in DIAGNOSTICS or family or key.startswith(SOURCES)
            if shown and value is not None:
                found[key].append(value)
        if number := row.get("peers/forwarded"):
            found["peers/effective_share"].append(row["peers/effective_samples"] / number)
    return {key: fmean(values) for key, values in sorted(found.items())}


def training_seconds(path: Path) -> dict[int, float]:
    """Step -> seconds of all agents' phases. What belongs to no agent (evaluation, checkpoints) and
    diagnostics are left out."""
    seconds: dict[int, float] = defaultdict(float)
    for (step, agent, phase), value in _phases(path).items():
        if agent and phase != "diagnostics":
            seconds[step] += value
    return dict(seconds)


def checking_seconds(path: Path, agent: str, before: int) -> float:
    """Seconds of an agent's diagnostics before a step."""
    return sum(
        value
        for (step, who, phase), value in _phases(path).items()
        if (who, phase) == (agent, "diagnostics") and step < before
    )


def _phases(path: Path) -> dict[tuple[int, str, str], float]:
    """(step, agent, phase) -> seconds. A step that was made twice, because the run was killed and
    resumed, counts each phase once: the second time its rollouts came from the journal."""
    longest: dict[tuple[int, str, str], float] = {}
    for line in read_whole_lines(path):
        row = json.loads(line)
        for phase, value in row.items():
            if phase not in ("step", "agent"):
                key = (row["step"], row["agent"], phase)
                longest[key] = max(longest.get(key, 0.0), value)
    return longest
