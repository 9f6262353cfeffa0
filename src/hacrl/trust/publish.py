"""What an agent publishes of its trajectories (`agents.*.publish`), and what reciprocity hides.

A row whose text is withheld keeps problem, index and verdict. It counts in baselines and capability,
if its source is trusted, and makes no sample.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import get_args

from hacrl.trust.settings import Level
from hacrl.types import Finish, Snapshot, Trajectory


def receives_texts(learner: Level, source: Level) -> bool:
    """Whether reciprocity lets a learner that publishes at its level read the texts of the source: it
    must publish at least as much."""
    levels = get_args(Level)
    return levels.index(learner) >= levels.index(source)


def has_text(row: Trajectory, level: Level) -> bool:
    """Whether an agent of this level publishes the text of a row. A row without an attempt has none."""
    return bool(row.turns) and (level == "all" or (level == "successes" and row.is_right))


def withheld(row: Trajectory) -> Trajectory:
    """The outcome of a row: problem, index and verdict. A row without an attempt stays as it is."""
    if row.finish is Finish.NOT_ATTEMPTED:
        return row
    return replace(
        without_details(row),
        turns=(),
        finish=Finish.WITHHELD,
        mean_logprob=None,
        num_tokens=0,
        shareable=False,
        tokens=None,
    )


def without_details(row: Trajectory) -> Trajectory:
    """The row without the verdict's details and the tokenizer's hash, which can identify answers and
    models."""
    verdict = replace(row.verdict, detail="") if row.verdict else None
    return replace(row, verdict=verdict, tokenizer="")


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
