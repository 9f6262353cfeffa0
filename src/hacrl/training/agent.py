"""One agent's loop. Everything else serves these two phases; a runtime decides where they run.

rollout phase   problems -> rollouts -> scores -> verdicts -> journal -> pool
learning phase  the step's committed cut -> my view -> credit -> updates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from hacrl.algorithms import Algorithm, Step
from hacrl.algorithms.capability import Capability, CapabilityHistory
from hacrl.config import AgentConfig, Config
from hacrl.errors import RunStopped, UserError
from hacrl.garbage import no_garbage
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.policy.update import UpdateReport
from hacrl.sampling.base import probe_facts
from hacrl.store.journal import Journal
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory, sample_rows
from hacrl.study.diagnostics import Diagnostics
from hacrl.tasks import Task
from hacrl.training.evaluate import attempt, judge, split_by_length
from hacrl.training.metrics import agreement_facts, learning_metrics, rollout_metrics
from hacrl.training.plan import minibatch, replaced
from hacrl.training.samples import ViewLimits, learner_view
from hacrl.training.timing import Clock
from hacrl.types import (
    Finish,
    Problem,
    Rollout,
    Sample,
    Sampling,
    Snapshot,
    Tokens,
    Trajectory,
    Turn,
    Update,
)
from hacrl.verify import VerifierPool


class Member(Protocol):
    """What a runtime asks of a team's member."""

    name: str

    def rollout(self, step: int) -> dict[str, Any]:
        """Publish the step's trajectories; metrics of the phase."""

    def learn(self, step: int) -> dict[str, Any]:
        """Learn from the step's cut; metrics of the phase. Empty for a member that does not. One
        that the step was closed without learns from the others' rows alone."""


class Agent:
    """A model that samples and, unless frozen, learns.

    Example: agent.rollout(0); pool.close(0, members); agent.learn(0)
    """

    def __init__(
        self,
        config: Config,
        agent: AgentConfig,
        *,
        policy: Policy,
        algorithm: Algorithm,
        task: Task,
        verifier: VerifierPool,
        pool: Pool,
        run: RunDirectory,
    ) -> None:
        self.name = agent.name
        self.config, self.agent, self.policy, self.algorithm = config, agent, policy, algorithm
        self.task, self.verifier, self.pool, self.run = task, verifier, pool, run
        self.journal = Journal(run.journal(agent.name))
        self.clock = Clock()
        self.plan = config.plan_of(agent, algorithm) if agent.learns else None
        self.learns_before = config.steps if agent.learn_steps is None else agent.learn_steps
        self.diagnostics: Diagnostics | None = None
        if self.plan and config.diagnostics.every:
            self.diagnostics = Diagnostics(
                config,
                agent,
                policy=policy,
                algorithm=algorithm,
                plan=self.plan,
                task=task,
                verifier=verifier,
                run=run,
            )
        self.capability = CapabilityHistory(
            pool.snapshot,
            window=config.algorithm.capability_window,
            by_task=config.algorithm.capability_by == "task",
            includes_step=config.algorithm.window_includes_step,
            ratio_min=config.algorithm.ratio_min,
            ratio_max=config.algorithm.ratio_max,
        )
        self.limits = ViewLimits(
            config.prompt_limit(agent), config.response_limit(agent), agent.too_long
        )
        longest = self.limits.max_prompt_tokens + self.limits.max_response_tokens
        if policy.context and longest > policy.context:
            raise UserError(
                f"agent {self.name!r}: max_prompt_tokens + max_response_tokens = {longest}, but its "
                f"model reads at most {policy.context} tokens. Lower one of the two, for the run or for "
                "this agent."
            )

    # ------------------------------------------------------------ the loop

    def rollout(self, step: int) -> dict[str, Any]:
        problems = self.task.batch(step, self.config.prompts_per_step)
        prompts, too_long = split_by_length(self.policy, problems, self.limits.max_prompt_tokens)
        entry = self.journal.read(step)
        if entry is None:
            with self.clock("sample"):
                rollouts = self._sample(step, prompts)
            with self.clock("score"):
                rollouts, facts = self._score(step, rollouts)
            with self.clock("verify"):
                rollouts = judge(rollouts, problems, self.verifier, self.agent.reply_start)
            self.journal.write(step, rollouts, facts)
        else:
            rollouts, facts = entry
        with self.clock("publish"):
            trajectories = self._trajectories(step, rollouts, problems, too_long)
            self.pool.publish(step, self.name, trajectories)
        return {**rollout_metrics(rollouts, len(too_long)), **facts}

    def learn(self, step: int) -> dict[str, Any]:
        if self.plan is None or step >= self.learns_before:
            return {}
        problems = {p.id: p for p in self.task.batch(step, self.config.prompts_per_step)}
        needs = self.algorithm.needs
        with self.clock("view"), no_garbage():
            own, _ = self.journal.read(step) or ([], {})  # none: closed without it
            cut = self.pool.snapshot(step)
            capability = self.capability.at(cut, list(dict.fromkeys((*cut.members, self.name))))
            samples, view = learner_view(
                cut.groups,
                own,
                problems,
                self.policy.renderer,
                self.name,
                self.limits,
                peers=needs.include("text"),
                needs_behaviour=needs.include("logprob"),
                needs_tokens=needs.include("tokens"),
                mask_truncated=self.agent.mask_truncated,
            )
        samples = self._credited(samples, cut, capability)
        checked: dict[str, Any] = {}
        if self.diagnostics and self.diagnostics.due(step):
            with self.clock("diagnostics"):
                checked = self.diagnostics.check(step, cut, problems, capability, samples)
        done: list[tuple[Update, list[Sample], UpdateReport]] = []
        with self.clock("update"):
            last = replaced(samples) if needs.updates == "with_own" else ()
            for update in self.plan.updates(problems, self.config.seed, step, last):
                batch = minibatch(samples, update)
                if batch:
                    loss = self.policy.at_scores(self.algorithm.loss, step)
                    report = self.policy.update(batch, loss, update)
                    done.append((update, batch, report))
                    self._stop_if_broken(step, batch, report)
        with self.clock("rest"):
            self.policy.offload()
        if self.config.log.samples:
            self.run.write_samples(self.name, step, sample_rows(done))
        return {
            **learning_metrics(
                done,
                self.plan,
                capability,
                cut.members,
                self.name,
                by_ratio=self.algorithm.weighs_by_ratio,
            ),
            **view.metrics(),
            **checked,
        }

    # ------------------------------------------------------------ its parts

    def _sample(self, step: int, prompts: dict[str, tuple[int, ...]]) -> list[Rollout]:
        return attempt(
            self.policy,
            prompts,
            step=step,
            samples=self.config.samples_of(self.agent),
            key=lambda problem_id, i: stream_key(self.config.seed, self.name, step, problem_id, i),
            temperature=self.config.temperature,
            limit=self.limits.max_response_tokens,
        )

    def _score(
        self, step: int, rollouts: Sequence[Rollout]
    ) -> tuple[list[Rollout], dict[str, float]]:
        """Put the trainer's log-probabilities in the place of the sampler's.

        With behaviour = "sampler" only a probe is scored, and the sampler's own stay while the two
        agree to within a tenth of the clip.
        """
        settings = self.config.sampler
        probe = list(rollouts)
        if settings.behaviour == "sampler":
            probe = probe[: settings.check_samples]
        scored = self._scored(probe)
        facts = {**agreement_facts(probe, scored), **probe_facts(self.policy.sampler)}
        gap, allowed = facts["agreement/mean_gap"], settings.tolerance or self._tolerance()
        if gap != gap:
            raise RunStopped(
                f"agent {self.name!r}: log-probabilities are not numbers (nan): the weights have "
                "diverged. Lower the learning rate and start again, or resume from an older checkpoint."
            )
        if not gap <= allowed:
            raise RunStopped(
                f"agent {self.name!r}: sampler and trainer differ by {gap:.3g} in a sequence's mean "
                f"log-probability, averaged over {len(probe)} sequences (allowed: {allowed:g}). The "
                "sampler's weights are stale, or the two compute different functions. If that is the "
                "rounding of your model, raise sampler.tolerance."
            )
        if settings.behaviour == "sampler":
            if facts["agreement/max_gap"] < self.config.algorithm.epsilon_low / 10:
                return list(rollouts), facts
            scored = self._scored(rollouts)
        self.policy.keep_scores(step)
        return scored, facts

    def _tolerance(self) -> float:
        """What rounding can explain: bfloat16 moves a short reply's mean by a few hundredths."""
        return 0.05 if self.policy.half else 1e-4

    def _scored(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        scores = self.policy.score([(r.prompt_ids, r.completion.token_ids) for r in rollouts])
        return [
            replace(r, completion=replace(r.completion, logprobs=tuple(s)))
            for r, s in zip(rollouts, scores, strict=True)
        ]

    def _credited(
        self, samples: Sequence[Sample], cut: Snapshot, capability: Capability
    ) -> list[Sample]:
        """The samples with advantage and weight. Peers' samples get the learner's log-probabilities
        before or after credit, as the algorithm needs."""
        when = self.algorithm.needs.score_peers
        if when == "before_credit":
            samples = self._score_peers(samples)
        with self.clock("view"), no_garbage():
            step = Step(self.name, samples, cut.groups, capability)
            samples = self.algorithm.credit(step)
        if when == "after_credit":
            samples = self._score_peers(samples)
        return samples

    def _score_peers(self, samples: Sequence[Sample]) -> list[Sample]:
        """My own log-probabilities on peers' samples, before the first update of the step."""
        peers = [s for s in samples if not s.is_own]
        split = [len(s.token_ids) - s.num_reply_tokens for s in peers]
        with self.clock("score"):
            scores = self.policy.score(
                [(s.token_ids[:n], s.token_ids[n:]) for s, n in zip(peers, split, strict=True)]
            )
        scored = iter(replace(s, old_logprobs=tuple(x)) for s, x in zip(peers, scores, strict=True))
        return [s if s.is_own else next(scored) for s in samples]

    def _trajectories(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        too_long: Sequence[Problem],
    ) -> list[Trajectory]:
        """What the others may see of this step: text and a few numbers."""
        task_of = {p.id: p.task for p in problems}
        learned = range(min(step, self.learns_before)) if self.plan else ()
        version = sum(not self.agent.is_away(earlier) for earlier in learned)
        sampling = Sampling(self.config.temperature, self.limits.max_response_tokens)
        begun = (
            (Turn("assistant", self.agent.reply_start, False),) if self.agent.reply_start else ()
        )
        attempted = [
            Trajectory(
                problem_id=r.problem_id,
                task=task_of[r.problem_id],
                agent=self.name,
                index=r.index,
                step=step,
                policy_version=version,
                turns=(*begun, Turn("assistant", r.completion.text, True)),
                finish=r.completion.finish,
                mean_logprob=r.mean_logprob,
                num_tokens=len(r.completion.token_ids),
                verdict=r.verdict,
                verifier=self.verifier.label,
                sampling=sampling,
                shareable=r.shareable,
                tokenizer=self.policy.renderer.vocabulary_hash,
                tokens=self._tokens(r) if self.algorithm.needs.include("tokens") else None,
            )
            for r in rollouts
        ]
        return attempted + [not_attempted(p, self.name, step, sampling) for p in too_long]

    def _tokens(self, r: Rollout) -> Tokens:
        return Tokens(
            self.policy.renderer.vocabulary_hash, r.completion.token_ids, r.completion.logprobs
        )

    def _stop_if_broken(self, step: int, batch: Sequence[Sample], report: UpdateReport) -> None:
        if self.policy.skipped_in_a_row < self.config.skip_limit:
            return
        path = self.run.save_broken_batch(self.name, step, batch)
        raise RunStopped(
            f"agent {self.name!r}, step {step}: {self.policy.skipped_in_a_row} updates in a row had a "
            f"non-finite loss or gradient (last: loss {report.loss}, norm {report.grad_norm}). Nothing "
            f"was changed by them; the batch is in {path}. Lower the learning rate or look at it."
        )


def not_attempted(problem: Problem, agent: str, step: int, sampling: Sampling) -> Trajectory:
    """Tells the others that this member has nothing to say on the problem."""
    return Trajectory(
        problem_id=problem.id,
        task=problem.task,
        agent=agent,
        index=0,
        step=step,
        policy_version=0,
        turns=(),
        finish=Finish.NOT_ATTEMPTED,
        mean_logprob=None,
        num_tokens=0,
        verdict=None,
        verifier="",
        sampling=sampling,
        shareable=False,
    )
