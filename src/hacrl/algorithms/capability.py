"""Capability: how strong each agent is, computed from the pool's snapshots.

    P_k    = mean over the last K steps with k present of k's mean judged reward      (eq. 9)
    w(a,b) = clamp(P_a / P_b, ratio_min, ratio_max)                                   (eq. 8 + guard)

Snapshots never change, so capability needs no checkpoint.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hacrl.types import Snapshot

SMALLEST = 1e-8  # so that the ratio with an agent that never succeeds exists
ALL_TASKS = ""  # the key of capability over the whole run

StepRewards = Mapping[tuple[str, str], float]
"""(agent, task) -> mean judged reward in one step; task is ALL_TASKS for the whole run."""


class CapabilitySettings(BaseModel):
    """Settings of algorithms that use capability."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    capability_window: int = Field(5, ge=1)
    """K: the number of steps over which an agent's capability is averaged (eq. 9)."""
    capability_by: Literal["run", "task"] = "run"
    """Measure capability over all tasks together (run), or for each task separately. The paper leaves
    this open."""
    window_includes_step: bool = True
    """Whether the window includes the current step (eq. 9). Off: the ratio does not depend on the
    current rewards, as the unbiasedness theorem assumes; the first step then uses ratio 1."""
    ratio_min: float = Field(0.1, gt=0)
    """Lower guard of the capability ratio (eq. 8 has none)."""
    ratio_max: float = Field(10.0, gt=0)
    """Upper guard of the capability ratio."""

    @model_validator(mode="after")
    def _guards(self) -> Self:
        if self.ratio_min > self.ratio_max:
            raise ValueError(
                f"ratio_min = {self.ratio_min:g} is above ratio_max = {self.ratio_max:g}"
            )
        return self


@dataclass(frozen=True)
class Capability:
    """The capability of every member at one step, and the guarded ratio.

    Example: Capability({("ant", ""): 0.25, ("bee", ""): 0.5}).ratio("bee", "ant") == 2.0
    """

    values: Mapping[tuple[str, str], float]
    by_task: bool = False
    ratio_min: float = 0.1
    ratio_max: float = 10.0

    def of(self, agent: str, task: str = ALL_TASKS) -> float | None:
        """P of the agent; None if no reply of it was ever judged."""
        return self.values.get((agent, task if self.by_task else ALL_TASKS))

    def ratio(self, a: str, b: str, task: str = ALL_TASKS) -> float:
        """w(a, b); 1 while one of the two is unknown."""
        first, second = self.of(a, task), self.of(b, task)
        if a == b or first is None or second is None:
            return 1.0
        ratio = max(first, SMALLEST) / max(second, SMALLEST)
        return min(max(ratio, self.ratio_min), self.ratio_max)


def step_rewards(snapshot: Snapshot) -> StepRewards:
    """Each member's mean judged reward in one snapshot, over all tasks and for each task."""
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in snapshot.groups:
        for t in group.judged:
            rewards[t.agent, ALL_TASKS].append(t.reward)
            rewards[t.agent, group.task].append(t.reward)
    return {key: sum(r) / len(r) for key, r in rewards.items()}


class CapabilityHistory:
    """Computes capability at any step and caches the mean rewards of each snapshot."""

    def __init__(self, read: Callable[[int], Snapshot], settings: CapabilitySettings) -> None:
        """`read` returns the snapshot of a step."""
        self._read, self.settings = read, settings
        self._steps: dict[int, StepRewards] = {}

    def at(self, snapshot: Snapshot, members: Collection[str]) -> Capability:
        """Return the capabilities as of this snapshot. Steps are read backwards until every member has
        filled its window; a step without the member does not count for it."""
        settings, window = self.settings, self.settings.capability_window
        by_task = settings.capability_by == "task"
        self._steps.setdefault(snapshot.step, step_rewards(snapshot))
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        newest = snapshot.step if settings.window_includes_step else snapshot.step - 1
        for step in range(newest, -1, -1):
            if step not in self._steps:
                self._steps[step] = step_rewards(self._read(step))
            for key, reward in self._steps[step].items():
                if key[0] in members and len(found[key]) < window:
                    found[key].append(reward)
            filled = all(len(found[m, ALL_TASKS]) >= window for m in members)
            if filled and not by_task:  # a rare task may need older steps
                break
        # Oldest first: the order of the sum is part of the result.
        values = {key: sum(reversed(r)) / len(r) for key, r in found.items() if r}  # (9)
        return Capability(values, by_task, settings.ratio_min, settings.ratio_max)
