"""One agent: its two phases of a step, and what it does between steps.

    rollout: problems -> rollouts -> verdicts -> scores -> journal -> pool
    learn:   the step's snapshot -> samples -> credit -> updates

loop.py decides when they run, an executor (local.py, cluster/) in which process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from hacrl.algorithms import Step
from hacrl.algorithms.capability import Capability, CapabilityHistory, CapabilitySettings
from hacrl.config import AgentConfig
from hacrl.errors import RunStopped
from hacrl.garbage import paused_gc
from hacrl.policy.policy import Policy
from hacrl.policy.update import UpdateReport
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.files import changed
from hacrl.store.journal import WAY_OUT, Journal
from hacrl.training.dynamic import round_metrics, sample_rounds
from hacrl.training.evaluate import attempt, evaluate, judge, step_prompts, stop_if_unjudged
from hacrl.training.late import credit_late, late_metrics, open_peers
from hacrl.training.metrics import learning_metrics, rollout_metrics, sample_rows
from hacrl.training.plan import Plan, minibatch, plan_of, replaced
from hacrl.training.samples import (
    DropReason,
    SampleLimits,
    SampleReport,
    check_context,
    make_samples,
)
from hacrl.training.schedule import make_schedule
from hacrl.training.scoring import recall_scores, score_peers, score_rollouts
from hacrl.training.timing import Clock
from hacrl.training.trajectories import make_trajectories
from hacrl.trust.publish import count_texts, public_rows
from hacrl.trust.validate import Invalid
from hacrl.trust.view import LateStep
from hacrl.types import Problem, Rollout, Sample, Sampling, Snapshot, Trajectory, Update

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


class Agent:
    """A model that samples and, unless frozen, learns.

    Example: agent.rollout(0); pool.close(0, ["wren"]); agent.learn(0)
    """

    def __init__(self, agent: AgentConfig, shared: Shared, policy: Policy) -> None:
        config = self.config = shared.config
        self.agent, self.name, self.policy = agent, agent.name, policy
        self.run, self.pool, self.task = shared.run, shared.pool, shared.task
        self.verifier, self.algorithm = shared.verifier, shared.algorithm
        self.journal = Journal(self.run.journal(self.name))
        self.checkpoints = Checkpoints(
            self.run.checkpoints(self.name), config.checkpoint.keep, self.run.digest()
        )
        self.dynamic = config.problems_per_step > config.prompts_per_step
        self.clock = Clock()
        self.notes: list[str] = []
        self.plan = self._plan(0) if agent.learns else None
        self.updates_per_step = len(self.plan.floors) if self.plan else 0
        self.learns_before = agent.learn_steps or max(agent.schedule_steps or 0, config.steps)
        self.schedule = make_schedule(agent, config.steps, self.updates_per_step)
        settings = config.algorithm
        self.capability = CapabilityHistory(
            self._snapshot,
            settings if isinstance(settings, CapabilitySettings) else CapabilitySettings(),
        )
        needs, self.tamper = self.algorithm.needs, shared.hooks.tamper
        self.view, self.defence, self.late = open_peers(
            agent, shared, policy.renderer, self._own_rows, self._problems
        )
        self.limits = SampleLimits(
            config.prompt_limit(agent), config.response_limit(agent), agent.too_long
        )
        check_context(agent, config, policy.context)
        self.make_trajectories = partial(
            make_trajectories,
            agent=self.name,
            sampling=Sampling(config.temperature, self.limits.max_response_tokens),
            verifier=self.verifier.label,
            tokenizer=policy.renderer.vocabulary_hash,
            reply_start=agent.reply_start,
            with_tokens=needs.include("tokens"),
        )
        self._step_prompts = partial(
            step_prompts,
            policy,
            self.task,
            config.problems_per_step,
            self.limits.max_prompt_tokens,
        )
        self.make_samples = partial(
            make_samples,
            renderer=policy.renderer,
            learner=self.name,
            limits=self.limits,
            needs=needs,
            mask_truncated=agent.mask_truncated,
            peer_filter=self.algorithm.peer_filter,
        )
        make_diagnostics = shared.hooks.diagnostics if config.diagnostics.every else None
        self.diagnostics = make_diagnostics(self) if make_diagnostics and self.plan else None

    # ------------------------------------------------------------ the two phases

    def rollout(self, step: int) -> dict[str, Any]:
        """Publish the step's trajectories and return metrics. A journalled step is not sampled again."""
        problems, prompts, too_long = self._step_prompts(step)
        entry = self.journal.read(step)
        if entry is None:
            rollouts = sample_rounds(
                prompts, self.config.prompts_per_step, partial(self._attempt, step, problems)
            )
            with self.clock("score"):
                rollouts, facts = score_rollouts(self.policy, self.config, step, rollouts)
            stop_if_unjudged(
                rollout_metrics(rollouts, len(too_long)),
                f"{self.name} learned nothing in step {step + 1}",
                self.config.verifier.kind,
                self._way_out,
            )
            self.journal.write(step, rollouts, facts)
        else:
            rollouts, facts = entry
        with self.clock("publish"):
            level, private = self.agent.publish, self.config.trust.judge_again
            rows = self._rows(step, rollouts, problems, too_long)
            rows = self.tamper(self, step, rows) if self.tamper else rows
            self.pool.publish(step, self.name, public_rows(rows, level, private))
        if level != "all":
            facts = {**facts, "withheld": len(rows) - len(too_long) - count_texts(rows, level)}
        rounds = round_metrics(rollouts) if self.dynamic else {}
        return {**rollout_metrics(rollouts, len(too_long)), **facts, **rounds}

    def republish(self, step: int) -> None:
        """Publish a journalled step again, because its batch is damaged."""
        if self.journal.read(step) is None:
            raise changed(
                self.journal.path(step), f"missing, and {self.pool.folder} is damaged, too"
            )
        self.rollout(step)

    def learn(self, step: int) -> dict[str, Any]:
        """Learn from the step's snapshot and return metrics; {} if this step is not learned."""
        if self.plan is None or step >= self.learns_before:
            return {}
        plan = self._plan(step)
        recall_scores(self.policy, self.journal, step)
        given = self._step_samples(step, plan)
        checked: dict[str, Any] = {}
        if self.diagnostics and step % self.config.diagnostics.every == 0:
            with self.clock("diagnostics"):
                checked = self.diagnostics.check(
                    step, given.snapshot, given.problems, given.capability, given.samples
                )
        done: list[tuple[Update, list[Sample], UpdateReport]] = []
        with self.clock("update"):
            for update, batch in self._minibatches(step, plan, given):
                update = replace(update, rate=self.rate(step, update.index))
                loss = self.policy.without_rounding(self.algorithm.loss, step)
                report = self.policy.update(batch, loss, update)
                done.append((update, batch, report))
                self._stop_if_broken(step, batch, report)
        with self.clock("offload"):
            self.policy.offload()
        if self.config.log.samples:
            self.run.write_samples(self.name, step, sample_rows(done))
        members = given.snapshot.members
        metrics = learning_metrics(done, plan, given.capability, members, self.name)
        return {**metrics, **given.metrics, **checked}

    # ------------------------------------------------------------ between steps

    def restore(self, steps: Sequence[int]) -> int | None:
        """Load the newest whole checkpoint among `steps` and return its step; 0 if there is none.
        None for a frozen agent."""
        if not self.agent.learns:
            return None
        found = self.checkpoints.newest_whole(self.notes.append, steps)
        if found is None:
            return 0
        self.policy.restore(self.checkpoints.load(found))
        return found

    def evaluate(self, done: int) -> tuple[dict[str, Any], bool]:
        """Answer the held-out problems alone; return metrics and whether this is the best so far."""
        with self.clock("evaluate"):
            problems = self.task.held_out(self.config.evaluation.most)
            folder = self.run.evaluation(done, self.name)
            when = f" after step {done}" if done else " before training"
            result = evaluate(
                self.policy, self.config, problems, self.verifier, folder, when, self._way_out
            )
        best = False
        if self.agent.learns and result.avg is not None:
            best = self.checkpoints.mark_best(done, result.avg.mean) and done > 0
        return result.metrics(), best

    def save(self, done: int) -> None:
        with self.clock("checkpoint"):
            self.checkpoints.save(self.policy.checkpoint(done))

    def prune(self, also: Collection[int]) -> None:
        """Remove old checkpoints; those of the steps in `also` stay."""
        self.checkpoints.prune(also)

    @property
    def _way_out(self) -> str:
        """What to do when no reply could be judged."""
        command = f"hacrl resume {self.run.path} --accept-changed"
        return f"Nothing of it is stored. Fix it, then `{command}` continues."

    # ------------------------------------------------------------ parts of the phases

    def _problems(self, step: int) -> dict[str, Problem]:
        return {p.id: p for p in self.task.batch(step, self.config.problems_per_step)}

    def _snapshot(self, step: int) -> Snapshot:
        """A closed step as this agent sees it."""
        return self.view.at(step, self._problems(step)).snapshot

    def _rows(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        too_long: Sequence[Problem],
    ) -> list[Trajectory]:
        """What the agent publishes of a step, before `publish` leaves parts out."""
        version = self._steps_learned(step)
        return self.make_trajectories(
            rollouts, problems, too_long, step=step, policy_version=version
        )

    def _own_rows(self, step: int) -> list[Trajectory] | None:
        """The complete rows of a journalled step."""
        if (entry := self.journal.read(step)) is None:
            return None
        problems, _, too_long = self._step_prompts(step)
        return self._rows(step, entry[0], problems, too_long)

    def _own_rollouts(self, step: int, snapshot: Snapshot) -> list[Rollout]:
        """The journalled rollouts of a step; none if the step was closed without this agent."""
        entry = self.journal.read(step)
        if entry is None and self.name in snapshot.members:
            raise changed(self.journal.path(step), "the file is missing", WAY_OUT)
        return entry[0] if entry else []

    def _step_samples(self, step: int, plan: Plan) -> StepSamples:
        """Turn the step's snapshot into credited samples, as far as `[trust]` admits them."""
        problems = self._problems(step)
        came_late = self._came_late(step) if plan.late else []
        with self.clock("samples"), paused_gc():
            seen = self.view.at(step, problems)
            for late in came_late:
                seen.include(late.seen)
            capability = self.capability.at(seen.snapshot, {*seen.snapshot.members, self.name})
            own = self._own_rollouts(step, seen.snapshot)
            samples, counts = self.make_samples(seen.snapshot.groups, own, problems)
        snapshot, samples = self.defence.admit(step, seen, samples, self._score_peers, came_late)
        self._count_left_out(step, counts, seen.invalid)
        credit = partial(self._credited, capability=capability)
        samples = self.defence.scaled(credit(samples, snapshot))
        late_samples = credit_late(step, came_late, self.defence, credit, samples)
        if self.dynamic:  # a problem of the list without samples is in no update
            problems = {s.problem_id: problems[s.problem_id] for s in samples}
        metrics = {
            **counts.metrics(),
            **Counter(f"samples/invalid/{row.kind}" for row in seen.invalid),
            **seen.metrics(),
            **self.defence.metrics,
            **(late_metrics(came_late, late_samples) if plan.late else {}),
        }
        return StepSamples(snapshot, capability, problems, samples, late_samples, metrics)

    def _minibatches(
        self, step: int, plan: Plan, given: StepSamples
    ) -> Iterator[tuple[Update, list[Sample]]]:
        """The step's updates in order, each with its samples. Updates without samples are left out."""
        last = replaced(given.samples) if self.algorithm.needs.updates == "with_own" else ()
        planned = plan.updates(given.problems, self.config.seed, step, last)
        batches = ((update, minibatch(given.samples, update)) for update in planned)
        for update, batch in chain(batches, plan.late_updates(given.late)):
            if batch:
                yield update, batch

    def _came_late(self, step: int) -> list[LateStep]:
        """The late batches to use in a step. Their samples are scored if `[trust]` needs that."""
        with self.clock("late"):
            steps = self.late.at(step, self.make_samples)
        if not self.config.trust.scores_peers:
            return steps
        return [replace(late, samples=self._score_peers(late.samples)) for late in steps]

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

    def _attempt(
        self, step: int, problems: Sequence[Problem], prompts: dict[str, tuple[int, ...]]
    ) -> list[Rollout]:
        """Sample and judge replies to prompts of `problems`."""
        with self.clock("sample"):
            rollouts = attempt(
                self.policy,
                prompts,
                seed=self.config.seed,
                step=step,
                samples=self.config.samples_of(self.agent),
                temperature=self.config.temperature,
                limit=self.limits.max_response_tokens,
            )
        with self.clock("verify"):
            return judge(rollouts, problems, self.verifier, self.agent.reply_start)

    def _credited(
        self, samples: Sequence[Sample], snapshot: Snapshot, capability: Capability
    ) -> list[Sample]:
        """Return the samples with advantage and weight. Peers' samples are scored before or after
        credit, as the algorithm needs."""
        when = self.algorithm.needs.score_peers
        if when == "before_credit":
            samples = self._score_peers(samples)
        trust = self.config.trust
        trusted = trust.trusted if trust.judge_again else None
        step = Step(self.name, samples, snapshot.groups, capability, trusted)
        with self.clock("samples"), paused_gc():
            credited = self.algorithm.credit(step)
        if when == "after_credit":
            credited = self.algorithm.credit(replace(step, samples=self._score_peers(credited)))
        return credited

    def _score_peers(self, samples: Sequence[Sample]) -> list[Sample]:
        """Fill in the log-probabilities that this agent's weights give to peers' samples before the
        step's first update."""
        with self.clock("score"):
            return score_peers(self.policy, samples)

    def rate(self, step: int, update: int = 0) -> float:
        """The schedule's factor of the learning rate at an update of a step."""
        return self.schedule(self._steps_learned(step) * self.updates_per_step + update)

    def _steps_learned(self, step: int) -> int:
        """Steps that the weights that sample `step` have learned."""
        learned = range(min(step, self.learns_before)) if self.plan else ()
        away = (self.agent.is_away(s) or self.pool.is_away(s) for s in learned)
        return sum(not is_away for is_away in away)

    def _plan(self, step: int) -> Plan:
        """The plan of a step; that of a team across owners follows its members."""
        return plan_of(self.pool.team(self.config, step), self.agent, self.algorithm)

    def _stop_if_broken(self, step: int, batch: Sequence[Sample], report: UpdateReport) -> None:
        if self.policy.skipped_in_a_row < self.config.skip_limit:
            return
        path = self.run.save_broken_batch(self.name, step, batch)
        raise RunStopped(
            f"agent {self.name!r}, step {step + 1}: {self.policy.skipped_in_a_row} updates in a row "
            f"had a non-finite loss or gradient (last: loss {report.loss}, norm {report.grad_norm}). "
            f"They changed no weight. The batch is in {path}. Lower the learning rate."
        )
