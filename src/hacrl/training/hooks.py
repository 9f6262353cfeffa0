"""What the caller of a run may add to it: diagnostics of a learner and watches over the metrics.

`hacrl.study.diagnostics` provides both; `training` itself does not import `study`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hacrl.algorithms.capability import Capability
    from hacrl.logs.metrics_log import Watch
    from hacrl.store.rundir import RunDirectory
    from hacrl.training.agent import Agent
    from hacrl.types import Problem, Sample, Snapshot


class Diagnostics(Protocol):
    """Measurements between credit and the first update. They change nothing in the run."""

    def due(self, step: int) -> bool: ...

    def check(
        self,
        step: int,
        snapshot: Snapshot,
        problems: Mapping[str, Problem],
        capability: Capability,
        samples: Sequence[Sample],
    ) -> dict[str, Any]:
        """Measure, and return metrics."""


@dataclass(frozen=True)
class Hooks:
    """Example: Hooks(diagnostics=Diagnostics, watches=(HarmWatch,))"""

    diagnostics: Callable[[Agent], Diagnostics] | None = None
    """Called for each learner of a run with diagnostics.every > 0. Must be importable on Ray."""
    watches: Sequence[Callable[[RunDirectory], Watch]] = ()
