"""The plan of a step: how many updates, which problems each takes, and the peers' floor at each.

It is made from the configured sizes before any drop, so that every agent's number of updates and
its floors are known beforehand: a part left empty by drops makes no update, but m advances.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from hacrl.algorithms import Algorithm, Needs
from hacrl.algorithms.base import Updates
from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.noise import order_key
from hacrl.types import Sample, Update

BLOCKS: dict[Updates, tuple[str, ...]] = {
    "own_first": ("own", "peers"),
    "peers_first": ("peers", "own"),
    "mixed": ("mixed",),
    "with_own": ("mixed",),
}
"""Of each order, the blocks that a step's samples are updated in."""


@dataclass(frozen=True)
class Plan:
    """Sizes and floors of every step of one learner.

    Example: 128 prompts x 8 samples, one peer with the same, minibatch_samples=512:
    Plan(prompts=128, parts=(("own", 2), ("peers", 2)), floors=(0.8, 0.825, 0.85, 0.875))
    """

    prompts: int
    parts: tuple[tuple[str, int], ...]
    """Blocks in order with the number of equal parts each is cut into."""
    floors: tuple[float, ...]
    """One for each update."""

    def updates(
        self, problem_ids: Iterable[str], seed: int, step: int, last: Collection[str] = ()
    ) -> list[Update]:
        """Split the step's problems, in seeded order but those of `last` behind the others, into the
        planned updates."""
        ordered = sorted(problem_ids, key=lambda p: (p in last, order_key(seed, step, p), p))
        updates: list[Update] = []
        for name, count in self.parts:
            for part in _equal_parts(ordered, count):
                m = len(updates)
                updates.append(Update(m, len(self.floors), self.floors[m], name, tuple(part)))
        return updates


def make_plan(
    *,
    learner: str,
    prompts: int,
    samples_per_prompt: Mapping[str, int],
    minibatch_samples: int,
    needs: Needs,
    floor: float,
    last_floor: float,
) -> Plan:
    """Return the plan of `learner` in a team with these samples per prompt for every agent."""
    own = samples_per_prompt[learner]
    peers = sum(g for name, g in samples_per_prompt.items() if name != learner)
    if not needs.include("text") or needs.updates == "with_own":  # no updates for peers' samples
        peers = 0
    groups = {"own": own, "peers": peers, "mixed": own + peers}  # samples of one prompt
    blocks = [name for name in BLOCKS[needs.updates] if groups[name] > 0]
    parts = tuple((name, ceil(prompts * groups[name] / minibatch_samples)) for name in blocks)
    for name, count in parts:
        if count > prompts:
            raise UserError(
                f"minibatch_samples = {minibatch_samples} is smaller than one whole group of the "
                f"{name} block of agent {learner!r} ({groups[name]} samples a prompt): groups are never "
                f"split. Set minibatch_samples to at least {groups[name]}."
            )
    return Plan(prompts, parts, _floors(sum(n for _, n in parts), floor, last_floor))


def plan_of(config: Config, agent: AgentConfig, algorithm: Algorithm) -> Plan:
    """Return a learner's plan. Raises UserError if minibatch_samples is too small."""
    settings = config.algorithm
    return make_plan(
        learner=agent.name,
        prompts=config.prompts_per_step,
        samples_per_prompt={a.name: config.samples_of(a) for a in config.agents},
        minibatch_samples=config.minibatch_samples,
        needs=algorithm.needs,
        floor=getattr(settings, "floor", 0.8),
        last_floor=getattr(settings, "last_floor", 0.875),
    )


def _floors(updates: int, floor: float, last_floor: float) -> tuple[float, ...]:
    """floor(m) = 1 - delta + m * delta_step, reaching last_floor at the last planned update."""
    if updates == 1:
        return (floor,)
    step = (last_floor - floor) / (updates - 1)
    return tuple(floor + m * step for m in range(updates))


def _equal_parts(items: Sequence[str], count: int) -> list[Sequence[str]]:
    """Consecutive parts whose sizes differ by at most one."""
    edges = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(edges)]


def replaced(samples: Iterable[Sample]) -> set[str]:
    """Problems of which only peers' samples are left."""
    own = {True: set[str](), False: set[str]()}
    for s in samples:
        own[s.is_own].add(s.problem_id)
    return own[False] - own[True]


def minibatch(samples: Sequence[Sample], update: Update) -> list[Sample]:
    """The samples that this update takes, in the plan's problem order."""
    position = {problem: i for i, problem in enumerate(update.problems)}
    wanted = {"own": (True,), "peers": (False,), "mixed": (True, False)}[update.part]
    chosen = [s for s in samples if s.problem_id in position and s.is_own in wanted]
    return sorted(chosen, key=lambda s: position[s.problem_id])
