"""From a closed step to the credited samples of one learner.

snapshot -> the learner's view of it (trust/view.py) -> samples (samples.py)
-> those that `[trust]` admits (trust/defence.py) -> advantages and weights (the algorithm's `credit`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from hacrl.algorithms import Step
from hacrl.algorithms.capability import Capability, CapabilityHistory, CapabilitySettings
from hacrl.config import AgentConfig
from hacrl.garbage import paused_gc
from hacrl.policy.policy import Policy
from hacrl.store.files import changed
from hacrl.store.journal import WAY_OUT, Journal, LearnerJournal
from hacrl.training.late import LateBatches, credit_late, late_metrics
from hacrl.training.plan import Plan
from hacrl.training.samples import DropReason, SampleMaker, SampleReport
from hacrl.training.scoring import score_peers
from hacrl.training.timing import Clock
from hacrl.trust.defence import Defence
from hacrl.trust.validate import Checker, Invalid
from hacrl.trust.view import LateStep, View
from hacrl.types import Problem, Rollout, Sample, Snapshot, Trajectory

if TYPE_CHECKING:
    from hacrl.training.local import Shared


@dataclass(frozen=True)
class StepSamples:
    """What an agent learns from in one step.

    Example: StepSamples(snapshot, capability, {"p1": problem}, samples, late=[], metrics={})
    """

    snapshot: Snapshot
    capability: Capability
    problems: dict[str, Problem]
    samples: list[Sample]  # credited: with advantage and weight
    late: list[list[Sample]]  # credited samples of late batches, by step and problem
    metrics: dict[str, Any]


class StepReader:
    """Reads closed steps for one learner.

    Example: StepReader(agent, shared, policy, own_rows, Clock(), notes=[]).read(3, plan).samples
    """

    def __init__(
        self,
        agent: AgentConfig,
        shared: Shared,
        policy: Policy,
        own_rows: Callable[[int], Sequence[Trajectory]],
        clock: Clock,
        notes: list[str],
    ) -> None:
        """`own_rows` returns the learner's complete rows of a step."""
        config, pool, verifier = shared.config, shared.pool, shared.verifier
        self.config, self.task, self.run, self.policy = config, shared.task, shared.run, policy
        self.name, self.algorithm = agent.name, shared.algorithm
        self.clock, self.notes = clock, notes
        folder = shared.run.journal(agent.name)
        renderer, needs = policy.renderer, self.algorithm.needs
        decoder = renderer if needs.include("tokens") else None
        own_journal, self.journal = LearnerJournal(folder), Journal(folder)
        self.view = View(
            agent,
            config,
            pool,
            Checker(config, verifier.label, verifier.reward_range, decoder),
            verifier,
            own_journal,
            own_rows,
            judges=needs.include("outcomes"),
            replaces_own=agent.publish != "all" or shared.hooks.tamper is not None,
        )
        self.late = LateBatches(config, pool, self.view, own_journal, self.problems)
        self.defence = Defence(agent.name, config, pool, own_journal)
        settings = config.algorithm
        self.capability = CapabilityHistory(
            lambda step: (
                self.view.at(step, self.problems(step), older=step < self.changed_at).snapshot
            ),
            settings if isinstance(settings, CapabilitySettings) else CapabilitySettings(),
        )
        self.maker = SampleMaker(
            renderer,
            agent.name,
            needs,
            config.prompt_limit(agent),
            config.response_limit(agent),
            agent.too_long,
            agent.mask_truncated,
            self.algorithm.peer_filter,
        )

    @cached_property
    def changed_at(self) -> int:
        """The step of the last accepted change of the inputs: earlier ones may have had other limits."""
        history = self.run.fingerprint().get("history", ())
        return max((entry["step"] for entry in history if entry.get("sampled_again")), default=0)

    def problems(self, step: int) -> dict[str, Problem]:
        """The problems of a step by id."""
        return {p.id: p for p in self.task.batch(step, self.config.problems_per_step)}

    def read(self, step: int, plan: Plan) -> StepSamples:
        """Turn the step's snapshot into credited samples, as far as `[trust]` admits them."""
        problems = self.problems(step)
        came_late = self._came_late(step) if plan.late else []
        with self.clock("samples"), paused_gc():
            seen = self.view.at(step, problems)
            for late in came_late:
                seen.include(late.seen)
            capability = self.capability.at(seen.snapshot, {*seen.snapshot.members, self.name})
            own = self._own_rollouts(step, seen.snapshot)
            samples, counts = self.maker.make(seen.snapshot.groups, own, problems)
        snapshot, samples = self.defence.admit(step, seen, samples, self._scored, came_late)
        self._count_left_out(step, counts, seen.invalid)
        credit = partial(self._credited, capability=capability)
        samples = self.defence.scaled(credit(samples, snapshot))
        late_samples = credit_late(step, came_late, self.defence, credit, samples)
        if self.config.has_rounds:  # a problem of the list without samples is in no update
            problems = {s.problem_id: problems[s.problem_id] for s in samples}
        metrics = {
            **counts.metrics(),
            **Counter(f"samples/invalid/{row.kind}" for row in seen.invalid),
            **seen.metrics(),
            **self.defence.metrics,
            **(late_metrics(came_late, late_samples) if plan.late else {}),
        }
        return StepSamples(snapshot, capability, problems, samples, late_samples, metrics)

    def _own_rollouts(self, step: int, snapshot: Snapshot) -> list[Rollout]:
        """The journalled rollouts of a step; none if the step was closed without this agent."""
        entry = self.journal.read(step)
        if entry is None and self.name in snapshot.members:
            raise changed(self.journal.path(step), "the file is missing", WAY_OUT)
        return entry[0] if entry else []

    def _came_late(self, step: int) -> list[LateStep]:
        """The late batches to use in a step. Their samples are scored if `[trust]` needs that."""
        with self.clock("late"):
            entry = self.journal.read(step)
            steps = self.late.at(step, self.maker, entry[0] if entry else [])
        if not self.config.trust.scores_peers:
            return steps
        return [replace(late, samples=self._scored(late.samples)) for late in steps]

    def _count_left_out(self, step: int, counts: SampleReport, invalid: Sequence[Invalid]) -> None:
        """Count what the step does not use, and note the first invalid rows of each agent."""
        counts.leave_out(self.defence.left_out)
        counts.drops.update((row.agent, DropReason.INVALID) for row in invalid)
        for name, count in Counter(row.agent for row in invalid).items():
            subject = f"agent {name!r} published invalid rows"
            if not any(row["text"].startswith(subject) for row in self.run.notes()):
                first = next(row.detail for row in invalid if row.agent == name)
                self.notes.append(
                    f"{subject}: {count} in step {step + 1}. The first: {first}. They are left out; the "
                    "rest of its batch is used. samples/drop/invalid in metrics.jsonl counts all."
                )
        self.notes += self.defence.notes

    def _credited(
        self, samples: Sequence[Sample], snapshot: Snapshot, capability: Capability
    ) -> list[Sample]:
        """Return the samples with advantage and weight. Peers' samples are scored before or after
        credit, as the algorithm needs."""
        when, trust = self.algorithm.needs.score_peers, self.config.trust
        if when == "before_credit":
            samples = self._scored(samples)
        trusted = trust.trusted if trust.judge_again else None
        step = Step(self.name, samples, snapshot.groups, capability, trusted)
        with self.clock("samples"), paused_gc():
            credited = self.algorithm.credit(step)
        if when == "after_credit":
            credited = self.algorithm.credit(replace(step, samples=self._scored(credited)))
        return credited

    def _scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the learner's log-probabilities of peers' replies before the first update."""
        with self.clock("score"):
            return score_peers(self.policy, samples)
