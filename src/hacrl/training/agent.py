"""One agent: its two phases of a step, and what it does between steps.

    rollout: problems -> rollouts -> verdicts -> scores -> journal -> pool
    learn:   the step's snapshot -> samples -> credit -> updates

loop.py decides when they run, an executor (local.py, cluster/) in which process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from hacrl.config import AgentConfig
from hacrl.errors import RunStopped, UserError
from hacrl.policy.policy import Policy
from hacrl.policy.update import UpdateReport
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.files import RESTORE, changed
from hacrl.store.journal import Journal
from hacrl.training.dynamic import round_metrics, sample_rounds
from hacrl.training.evaluate import attempt, evaluate, judge, short_prompts, stop_if_unjudged
from hacrl.training.metrics import learning_metrics, rollout_metrics, sample_rows
from hacrl.training.plan import Plan, minibatch, plan_of, replaced
from hacrl.training.samples import check_context
from hacrl.training.schedule import make_schedule
from hacrl.training.scoring import recall_scores, score_rollouts
from hacrl.training.step_reader import StepReader, StepSamples
from hacrl.training.timing import Clock
from hacrl.training.trajectories import make_trajectories
from hacrl.trust.publish import count_texts, public_rows
from hacrl.types import Problem, Rollout, Sample, Trajectory, Update

if TYPE_CHECKING:
    from hacrl.training.local import Shared

SKIP_LIMIT = 5  # number of non-finite updates in a row that stops the run
FIRST_STEPS = 8  # steps whose prompts are measured if none of the first step fits


class Agent:
    """A model that samples and, unless frozen, learns.

    Example: agent.rollout(0); pool.close(0, ["wren"]); agent.learn(0)
    """

    def __init__(self, agent: AgentConfig, shared: Shared, policy: Policy) -> None:
        config = self.config = shared.config
        self.agent, self.name, self.policy = agent, agent.name, policy
        self.run, self.pool, self.task = shared.run, shared.pool, shared.task
        self.verifier, self.algorithm = shared.verifier, shared.algorithm
        self.tamper = shared.hooks.tamper
        check_context(agent, config, policy.context)
        self.journal = Journal(self.run.journal(self.name))
        self.checkpoints = Checkpoints(
            self.run.checkpoints(self.name), config.checkpoint.keep, self.run.digest()
        )
        self.clock = Clock()
        self.notes: list[str] = []
        self.plan = self._plan(0) if agent.learns else None
        self.updates_per_step = len(self.plan.floors) if self.plan else 0
        self.schedule = make_schedule(agent, config.steps, self.updates_per_step)
        self.reader = StepReader(agent, shared, policy, self._own_rows, self.clock, self.notes)
        make_diagnostics = shared.hooks.diagnostics if config.diagnostics.every else None
        self.diagnostics = make_diagnostics(self) if make_diagnostics and self.plan else None

    # ------------------------------------------------------------ the two phases

    def rollout(self, step: int) -> dict[str, Any]:
        """Publish the step's trajectories and return metrics. A journalled step is not sampled again."""
        problems, prompts = self._prompts(step)
        too_long = len(problems) - len(prompts)
        entry = self.journal.read(step)
        if entry is None:
            wanted = self.config.prompts_per_step
            rollouts = sample_rounds(prompts, wanted, partial(self._attempt, step, problems))
            with self.clock("score"):
                tolerance = self.config.sampler.tolerance
                rollouts, facts = score_rollouts(self.policy, step, rollouts, tolerance)
            stop_if_unjudged(
                rollout_metrics(rollouts, too_long),
                f"{self.name} learned nothing in step {step + 1}",
                self.config.verifier.kind,
                self._way_out,
            )
            self.journal.write(step, rollouts, facts)
        else:
            rollouts, facts = entry
        with self.clock("publish"):
            rows = make_trajectories(self, step, rollouts, problems, prompts)
            rows = self._publish(step, rows)
        if (level := self.agent.publish) != "all":
            facts = {**facts, "withheld": len(rows) - too_long - count_texts(rows, level)}
        rounds = round_metrics(rollouts) if self.config.has_rounds else {}
        return {**rollout_metrics(rollouts, too_long), **facts, **rounds}

    def republish(self, step: int) -> None:
        """Publish a journalled step again, because its batch is damaged."""
        self._publish(step, self._own_rows(step))

    def learn(self, step: int) -> dict[str, Any]:
        """Learn from the step's snapshot and return metrics."""
        plan = self._plan(step)
        recall_scores(self.policy, self.journal, step)
        given = self.reader.read(step, plan)
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

    def _publish(self, step: int, rows: list[Trajectory]) -> list[Trajectory]:
        """Publish rows as `publish` and trust allow; return them all, after `hooks.tamper`."""
        rows = self.tamper(self, step, rows) if self.tamper else rows
        level, private = self.agent.publish, self.config.trust.judge_again
        self.pool.publish(step, self.name, public_rows(rows, level, private))
        return rows

    def _prompts(self, step: int) -> tuple[list[Problem], dict[str, tuple[int, ...]]]:
        """The step's problems, and by problem id the prompts that are not too long."""
        limit = self.config.prompt_limit(self.agent)
        count = self.config.problems_per_step
        problems = self.task.batch(step, count)
        prompts = short_prompts(self.policy, problems, limit)
        if step == 0 and not prompts:
            first = [p for later in range(FIRST_STEPS) for p in self.task.batch(later, count)]
            if not short_prompts(self.policy, first, limit):
                raise UserError(
                    f"agent {self.name!r}: every prompt of the first {len(first)} problems is longer "
                    f"than max_prompt_tokens = {limit}. Raise it, or check the agent's template and "
                    "tokenizer."
                )
        return problems, prompts

    def _own_rows(self, step: int) -> list[Trajectory]:
        """The complete rows of a journalled step. It may be one that is not sampled again."""
        if (entry := self.journal.read(step, RESTORE)) is None:
            raise changed(self.journal.path(step), "the file is missing")
        problems, prompts = self._prompts(step)
        # After an accepted change of the task or a limit, an older step has other prompts than it had.
        known = {p.id for p in problems}
        rollouts = [r for r in entry[0] if r.problem_id in known]
        attempted = {*prompts, *(r.problem_id for r in rollouts)}
        return make_trajectories(self, step, rollouts, problems, attempted)

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
                limit=self.config.response_limit(self.agent),
            )
        with self.clock("verify"):
            return judge(rollouts, problems, self.verifier, self.agent.reply_start)

    def rate(self, step: int, update: int = 0) -> float:
        """The schedule's factor of the learning rate at an update of a step."""
        return self.schedule(self.steps_learned(step) * self.updates_per_step + update)

    def steps_learned(self, step: int) -> int:
        """Steps that the weights that sample `step` have learned."""
        return sum(not self.pool.is_away(s) for s in range(step)) if self.plan else 0

    def _plan(self, step: int) -> Plan:
        """The plan of a step; that of a team across owners follows its members."""
        return plan_of(self.pool.team(self.config, step), self.agent, self.algorithm)

    def _stop_if_broken(self, step: int, batch: Sequence[Sample], report: UpdateReport) -> None:
        if self.policy.skipped_in_a_row < SKIP_LIMIT:
            return
        path = self.run.save_broken_batch(self.name, step, batch)
        raise RunStopped(
            f"agent {self.name!r}, step {step + 1}: {self.policy.skipped_in_a_row} updates in a row "
            f"had a non-finite loss or gradient (last: loss {report.loss}, norm {report.grad_norm}). "
            f"They changed no weight. The batch is in {path}. Lower the learning rate."
        )
