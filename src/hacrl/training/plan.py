"""The plan of a step: the number of updates, the problems of each, and the peers' floor at each.

It depends on the configured sizes only, not on dropped samples, so every agent's number of updates and
its floors are known in advance. A part that has no samples makes no update, but m advances.
"""

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
"""The blocks of a step's updates, in order."""


@dataclass(frozen=True)
class Plan:
    """Sizes and floors of every step of one learner.

    Example: 128 prompts x 8 samples, one peer with the same, minibatch_samples=512:
    Plan(parts=(("own", 2), ("peers", 2)), floors=(0.8, 0.825, 0.85, 0.875))
    """

    parts: tuple[tuple[str, int], ...]  # blocks in order, with the number of equal parts of each
    floors: tuple[float, ...]  # one per update
    late: int = 0  # updates for samples of late batches, the last ones of the step

    def updates(
        self, problem_ids: Iterable[str], seed: int, step: int, last: Collection[str] = ()
    ) -> list[Update]:
        """Split the problems into the planned updates, in seeded order, those of `last` at the end."""
        ordered = sorted(problem_ids, key=lambda p: (p in last, order_key(seed, step, p), p))
        updates: list[Update] = []
        for name, count in self.parts:
            edges = [round(i * len(ordered) / count) for i in range(count + 1)]
            for start, end in pairwise(edges):
                m, problems = len(updates), tuple(ordered[start:end])
                updates.append(Update(m, self.floors[m], name, problems))
        return updates

    def late_updates(self, groups: Sequence[Sequence[Sample]]) -> list[tuple[Update, list[Sample]]]:
        """Split late samples, by step and problem, into the updates that are planned for them."""
        first = len(self.floors) - self.late
        edges = [round(i * len(groups) / self.late) for i in range(self.late + 1)] if groups else []
        found = []
        for m, (start, end) in enumerate(pairwise(edges), start=first):
            if batch := [s for group in groups[start:end] for s in group]:
                problems = tuple(dict.fromkeys(s.problem_id for s in batch))
                found.append((Update(m, self.floors[m], "late", problems), batch))
        return found


def make_plan(
    learner: str,
    samples_per_prompt: Mapping[str, int],
    needs: Needs,
    *,
    prompts: int,
    minibatch_samples: int,
    floor: float,
    last_floor: float,
    late_samples: int = 0,
) -> Plan:
    """Return the plan of `learner` in a team with these samples per prompt of every agent."""
    own = samples_per_prompt[learner]
    peers = sum(samples_per_prompt.values()) - own if needs.peers_add_updates else 0
    groups = {"own": own, "peers": peers, "mixed": own + peers}  # samples of one prompt
    blocks = [name for name in BLOCKS[needs.updates] if groups[name] > 0]
    parts = tuple((name, ceil(prompts * groups[name] / minibatch_samples)) for name in blocks)
    for name, count in parts:
        if count > prompts:
            raise UserError(
                f"minibatch_samples = {minibatch_samples} is smaller than a group of agent {learner!r} "
                f"({name} samples). Groups are not split: set it to at least {groups[name]}."
            )
    updates = sum(count for _, count in parts)
    rise = (last_floor - floor) / max(updates - 1, 1)  # eq. 14
    late = ceil(late_samples / minibatch_samples) if needs.peers_add_updates else 0
    floors = (floor + m * rise for m in range(updates))
    return Plan(parts, (*floors, *[last_floor] * late), late)


def plan_of(config: Config, agent: AgentConfig, algorithm: Algorithm) -> Plan:
    """Return a learner's plan. Raises UserError if minibatch_samples is too small."""
    return make_plan(
        agent.name,
        {a.name: config.samples_of(a) for a in config.agents},
        algorithm.needs,
        prompts=config.prompts_per_step,
        minibatch_samples=config.minibatch_samples,
        floor=getattr(config.algorithm, "floor", 0.0),  # 0: the algorithm has no floor
        last_floor=getattr(config.algorithm, "last_floor", 0.0),
        late_samples=config.late_samples,
    )


def replaced(samples: Sequence[Sample]) -> set[str]:
    """Return the problems with peers' samples only."""
    own = {s.problem_id for s in samples if s.is_own}
    return {s.problem_id for s in samples} - own


def minibatch(samples: Sequence[Sample], update: Update) -> list[Sample]:
    """Return the samples of this update, in the plan's order of problems."""
    position = {problem: i for i, problem in enumerate(update.problems)}
    wanted = {"own": (True,), "peers": (False,), "mixed": (True, False)}[update.part]
    chosen = [s for s in samples if s.problem_id in position and s.is_own in wanted]
    return sorted(chosen, key=lambda s: position[s.problem_id])
