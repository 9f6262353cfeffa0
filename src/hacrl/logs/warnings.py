"""Warnings about a run's metrics: a learner without updates, a learner that ignores its peers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]

NEARLY_NONE = 0.05
"""Fraction of peers' samples with a gradient below which a learner does not learn from peers."""
BELOW_FLOOR = 0.5
"""Fraction of peers' samples below the floor from which on the floor is named as the reason."""
STEPS = 5
"""Steps that are averaged."""


class IdleWatch:
    """Warns once per learner about a step without an update."""

    def __init__(self, run: RunDirectory) -> None:
        self._warned: set[str] = set()

    def look(self, rows: Sequence[Row]) -> list[str]:
        found = []
        for row in rows:
            if row.get("updates") != 0 or row.get("absent") or row["agent"] in self._warned:
                continue
            self._warned.add(row["agent"])
            unjudged = row["verdict/timeout"] + row["verdict/error"]
            found.append(
                f"agent {row['agent']!r} learned nothing in step {row['step'] + 1}: of "
                f"{row['rollouts']} rollouts {unjudged} could not be judged, "
                f"{row['not_attempted']} prompts were too long, {row['updates_skipped']} updates "
                "were not finite."
            )
        return found


class UnusedPeersWatch:
    """Warns once per learner, also across a resume, that nearly no peer sample had a gradient.

    Example: watch = UnusedPeersWatch(run); watch.look(rows) == [] or one sentence per learner
    """

    def __init__(self, run: RunDirectory) -> None:
        self._last: dict[str, deque[Row]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._warned: set[str] = set()
        self.look(run.metrics())

    def look(self, rows: Sequence[Row]) -> list[str]:
        found = []
        for row in rows:
            learner = row["agent"]
            if row["kind"] != "train" or not row.get("peers/forwarded") or learner in self._warned:
                continue
            last = self._last[learner]
            last.append(row)
            if len(last) == STEPS and _mean(last, "peers/used") < NEARLY_NONE:
                self._warned.add(learner)
                found.append(_sentence(learner, last))
        return found


WATCHES = (IdleWatch, UnusedPeersWatch)


def _mean(rows: Sequence[Row], name: str) -> float:
    """Mean over samples: each step counts by its number of forwarded peer samples."""
    total = sum(row["peers/forwarded"] for row in rows)
    return float(sum(row["peers/forwarded"] * row[name] for row in rows) / total)


def _sentence(learner: str, rows: Sequence[Row]) -> str:
    used, below = _mean(rows, "peers/used"), _mean(rows, "peers/below_floor")
    text = (
        f"{learner} learns almost nothing from its peers: only {100 * used:.1f} % of their samples "
        f"had a gradient in the {len(rows)} steps up to step {rows[-1]['step'] + 1}. "
    )
    if below >= BELOW_FLOOR:
        text += (
            f"{100 * below:.0f} % lay below the floor. Algorithms without a floor use such samples "
            "(algorithm.name=naive or overlap). "
        )
    return text + "`hacrl compare` measures whether peers help (docs/diagnostics.md)."
