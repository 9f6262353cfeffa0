"""When a learner is said to hardly learn from its peers: next to none of their samples had a gradient.

Where the others write very differently, a trust interval leaves out nearly all of their texts, and a
team then costs what it costs and shares nothing. A run says so once, after a few steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""

NEARLY_NONE = 0.05
"""Share of peers' samples with a gradient below which sharing cannot be what a learner gains by."""
BELOW_FLOOR = 0.5
"""Share below the floor from which on the floor is named as the reason."""
STEPS = 5
"""Looked at together."""


class UnusedWatch:
    """Tells it once of each learner, also across a resume: what the metrics of before told is known.

    Example: watch = UnusedWatch(run); watch.look(rows) == [] or one sentence for each learner
    """

    def __init__(self, run: RunDirectory) -> None:
        self._last: dict[str, deque[Row]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._told: set[str] = set()
        self.look(run.metrics())

    def look(self, rows: Sequence[Row]) -> list[str]:
        """Sentences for what these rows add to those before."""
        found = []
        for row in rows:
            learner = row["agent"]
            if row["kind"] != "train" or not row.get("peers/forwarded") or learner in self._told:
                continue
            last = self._last[learner]
            last.append(row)
            if len(last) == STEPS and _mean(last, "peers/used") < NEARLY_NONE:
                self._told.add(learner)
                found.append(_sentence(learner, last))
        return found


def _mean(rows: Sequence[Row], name: str) -> float:
    """Each sample that was compared counts once."""
    total = sum(row["peers/forwarded"] for row in rows)
    return float(sum(row["peers/forwarded"] * row[name] for row in rows) / total)


def _sentence(learner: str, rows: Sequence[Row]) -> str:
    used, below = _mean(rows, "peers/used"), _mean(rows, "peers/below_floor")
    said = (
        f"{learner} hardly learns from its peers: in {len(rows)} steps up to step {rows[-1]['step']}, "
        f"{100 * used:.1f} % of their samples had a gradient. "
    )
    if below >= BELOW_FLOOR:
        said += (
            f"{100 * below:.0f} % lay below the floor; rules without one use such texts "
            "(algorithm.name=naive or overlap). "
        )
    return said + "Whether sharing helps here, hacrl compare tells (docs/diagnostics.md)."
