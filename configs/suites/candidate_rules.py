"""Candidate sharing rules of candidates.toml. A suite names them by import path (docs/extending.md).

Gated...    leaves out peers whose capability is below `gate` times the learner's
Early...    learns from peers in the first `until` steps only, then alone
Relative    hacpo whose s is divided by the median s of the source in this step
PerToken    hacpo whose s compares whole texts, per token of the learner:
            s = exp( (log pi_k(y) - log pi_j(y)) / |y|_k ), with any two tokenizers
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from statistics import mean, median

from pydantic import Field

from hacrl.algorithms import Needs, Step
from hacrl.algorithms.hacpo import Hacpo
from hacrl.algorithms.naive import Naive, NaiveSettings
from hacrl.algorithms.overlap import Overlap, OverlapSettings
from hacrl.types import Group, Sample


def without(step: Step, agents: Collection[str]) -> Step:
    """The step as if these agents had taken no part."""
    samples = [s for s in step.samples if s.source not in agents]
    groups = []
    for group in step.groups:
        rows = tuple(t for t in group.trajectories if t.agent not in agents)
        if rows:
            groups.append(Group(group.problem_id, group.task, rows))
    return replace(step, samples=samples, groups=groups)


def peers(step: Step) -> set[str]:
    return {t.agent for g in step.groups for t in g.trajectories} - {step.learner}


def weak(step: Step, gate: float) -> set[str]:
    """The peers whose capability is below `gate` times the learner's."""
    return {p for p in peers(step) if step.capability.ratio(p, step.learner) < gate}


def number(step: Step) -> int:
    """Steps before this one."""
    return step.groups[0].trajectories[0].step if step.groups else 0


class GatedNaiveSettings(NaiveSettings):
    gate: float = Field(0.25, ge=0)


class GatedNaive(Naive):
    Settings = GatedNaiveSettings

    def credit(self, step: Step) -> list[Sample]:
        return super().credit(without(step, weak(step, self.settings.gate)))


class GatedOverlapSettings(OverlapSettings):
    gate: float = Field(0.25, ge=0)


class GatedOverlap(Overlap):
    Settings = GatedOverlapSettings

    def credit(self, step: Step) -> list[Sample]:
        return super().credit(without(step, weak(step, self.settings.gate)))


class EarlyNaiveSettings(NaiveSettings):
    until: int = Field(25, ge=0)


class EarlyNaive(Naive):
    Settings = EarlyNaiveSettings

    def credit(self, step: Step) -> list[Sample]:
        late = number(step) >= self.settings.until
        return super().credit(without(step, peers(step)) if late else step)


class EarlyOverlapSettings(OverlapSettings):
    until: int = Field(25, ge=0)


class EarlyOverlap(Overlap):
    Settings = EarlyOverlapSettings

    def credit(self, step: Step) -> list[Sample]:
        late = number(step) >= self.settings.until
        return super().credit(without(step, peers(step)) if late else step)


class Relative(Hacpo):
    needs = Needs("logprob", "before_credit")

    def credit(self, step: Step) -> list[Sample]:
        log_s: dict[str, list[float]] = defaultdict(list)
        for s in step.samples:
            if not s.is_own:
                log_s[s.source].append(mean(s.old_logprobs) - s.behaviour)
        middle = {source: median(found) for source, found in log_s.items()}
        moved = [
            s if s.is_own else replace(s, behaviour=s.behaviour + middle[s.source])
            for s in step.samples
        ]
        return super().credit(replace(step, samples=moved))


class PerToken(Hacpo):
    def credit(self, step: Step) -> list[Sample]:
        moved = []
        for s in step.samples:
            if s.is_own:
                moved.append(s)
            else:
                total = s.behaviour * step.reply(s).num_tokens
                moved.append(replace(s, behaviour=total / s.num_reply_tokens))
        return super().credit(replace(step, samples=moved))
