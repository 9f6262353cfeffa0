"""Hooks that the caller of a run may pass: diagnostics of a learner, and simulated attacks.

`hacrl.study.diagnostics` provides the first; `training` does not import `study`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.training.agent import Agent
    from hacrl.types import Trajectory


@dataclass(frozen=True)
class Hooks:
    """Example: Hooks(diagnostics=Diagnostics)"""

    diagnostics: Callable[[Agent], Any] | None = None
    """Called for each learner of a run with diagnostics.every > 0. The result has a method `check` that
    measures between credit and the first update, changes nothing and returns metrics
    (study/diagnostics/check.py). Must be importable on Ray."""
    tamper: Callable[[Agent, int, list[Trajectory]], list[Trajectory]] | None = None
    """For studies of attacks: called with an agent, the step and the rows it would publish; returns the
    rows to publish instead. The agent itself learns from its true rows."""
