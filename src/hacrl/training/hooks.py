"""Hooks that the caller of a run may pass: diagnostics of a learner, and simulated attacks.

`hacrl.study.diagnostics` provides the first; `training` itself does not import `study`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hacrl.algorithms.capability import Capability
    from hacrl.training.agent import Agent
    from hacrl.types import Problem, Sample, Snapshot, Trajectory


class Diagnostics(Protocol):
    """Measurements between credit and the first update. They change nothing in the run."""

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
    """Example: Hooks(diagnostics=Diagnostics)"""

    diagnostics: Callable[[Agent], Diagnostics] | None = None
    """Called for each learner of a run with diagnostics.every > 0. Must be importable on Ray."""
    tamper: Callable[[Agent, int, list[Trajectory]], list[Trajectory]] | None = None
    """For studies of attacks: called with an agent, the step and the rows it would publish; returns the
    rows to publish instead. The agent itself learns from its true rows."""
