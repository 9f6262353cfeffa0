"""What an agent publishes of its trajectories (`agents.*.publish`), and what reciprocity hides.

A row whose text is withheld keeps problem, index and verdict. It counts in baselines and capability,
if its source is trusted, and makes no sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hacrl.trust import Level, has_text, receives_texts, withheld, without_details
from hacrl.types import Snapshot, Trajectory


def public_rows(rows: Iterable[Trajectory], level: Level, private: bool) -> list[Trajectory]:
    """The rows as an agent of this level publishes them. `private` removes details of verdicts and the
    hash of the tokenizer; both can identify answers and models."""
    if level == "nothing":
        return []
    shown = [t if has_text(t, level) else withheld(t) for t in rows]
    return [without_details(t) for t in shown] if private else shown


def count_texts(rows: Iterable[Trajectory], level: Level) -> int:
    """The number of texts that an agent of this level publishes."""
    return sum(has_text(t, level) for t in rows)


def received(snapshot: Snapshot, learner: str, levels: Mapping[str, Level]) -> Snapshot:
    """The snapshot as reciprocity shows it to a learner."""
    hidden = {name for name in levels if not receives_texts(levels[learner], levels[name])}
    if not hidden:
        return snapshot
    return snapshot.mapped(lambda t: withheld(t) if t.agent in hidden else t)
