"""Agents as in a run, over a trace: forced lengths, given rewards, chosen rows outside the clip."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hacrl.algorithms import make_algorithm
from hacrl.config import Config, parse_config
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Reply, Request
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.agent import Agent
from hacrl.training.hooks import Hooks
from hacrl.training.local import Shared
from hacrl.types import Message, Problem, Rollout, Snapshot, Verdict
from hacrl.verify import VerifierPool
from hacrl.verify.settings import VerifierConfig
from speed.shapes import make_policy, text_of
from speed.work import ways_of
from speed.workload import Trace

Key = tuple[str, int]
"""Problem id and index of a reply."""

INSIDE, OUTSIDE = 0.07, 0.5
"""How far a peer row's behaviour is put above the learner's own mean log-probability: s = 0.93 lies
inside every floor's interval, s = 0.61 below every floor."""


class TraceTask:
    """The trace's prompts, the same in every step."""

    name = "bench"

    def __init__(self, trace: Trace) -> None:
        self.problems = [
            Problem(str(p), (Message("user", text_of(ids)),), answer="1", task="bench")
            for p, ids in enumerate(trace.prompts)
        ]

    def batch(self, step: int, count: int) -> list[Problem]:
        return self.problems[:count]

    def held_out(self, count: int | None) -> list[Problem]:
        return []


class TraceVerifier:
    """Reads every reply as a run would, and then says what the workload file says."""

    def __init__(self, trace: Trace, pool: VerifierPool) -> None:
        self.rewards = [r for row in trace.rewards for r in row]
        self.pool = pool
        self.label, self.reward_range = pool.label, pool.reward_range

    def judge_all(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        verdicts = self.pool.judge_all(items)
        return [
            replace(verdict, reward=float(reward))
            for verdict, reward in zip(verdicts, self.rewards, strict=True)
        ]


class ForcedLengths:
    """The policy's sampler, with the trace's length of each reply as its limit."""

    def __init__(self, sampler: Any, trace: Trace) -> None:
        self.sampler = sampler
        self.limits = [n for _, n in trace.rows]

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        limited = [replace(r, limit=n) for r, n in zip(requests, self.limits, strict=True)]
        return self.sampler.sample(limited, temperature)

    def weights_changed(self) -> None:
        self.sampler.weights_changed()


class GivenReplies(ForcedLengths):
    """Random replies of the trace's lengths, where sampling is not what is measured."""

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        vocabulary = self.sampler.model.config.vocab_size
        drawn = torch.Generator().manual_seed(5)
        return [
            Reply(
                tuple(torch.randint(0, vocabulary, (n,), generator=drawn).tolist()),
                (0.0,) * n,
                False,
            )
            for n in self.limits
        ]


class ChosenBehaviour:
    """A pool in which a learner sees the peers' rows with the behaviour that the benchmark chose."""

    def __init__(self, pool: Any, learner: str, behaviour: Mapping[Key, float]) -> None:
        self.pool, self.learner, self.behaviour = pool, learner, behaviour

    def snapshot(self, step: int) -> Snapshot:
        snapshot = self.pool.snapshot(step)
        groups = tuple(
            replace(
                group,
                trajectories=tuple(
                    t
                    if t.agent == self.learner
                    else replace(t, mean_logprob=self.behaviour[(t.problem_id, t.index)])
                    for t in group.trajectories
                ),
            )
            for group in snapshot.groups
        )
        return replace(snapshot, groups=groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)


class Team:
    """Policies, one trace each, and their common resources; agents are created for each arm."""

    def __init__(
        self,
        shapes: Mapping[str, str],
        traces: Mapping[str, Trace],
        folder: Path,
        device: torch.device,
        *,
        minibatch: int,
        fields: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.traces, self.folder, self.device = traces, folder, device
        self.minibatch, self.fields = minibatch, fields
        self.policies: dict[str, Policy] = {
            name: make_policy(shape, device, name, **fields[name]) for name, shape in shapes.items()
        }
        self.samplers = {name: policy.sampler for name, policy in self.policies.items()}
        for name, policy in self.policies.items():
            policy.sampler = ForcedLengths(policy.sampler, traces[name])
        self.verifiers = VerifierPool(VerifierConfig(kind="number"))
        self.run = RunDirectory.create(folder / "run", self.config("gspo"))
        self.pool = Pool(self.run.pool_path)

    def config(self, algorithm: str) -> Config:
        trace = next(iter(self.traces.values()))
        longest = max(n for t in self.traces.values() for _, n in t.rows)
        return parse_config(
            {
                "steps": 100,
                "prompts_per_step": len(trace.prompts),
                "samples_per_prompt": len(trace.lengths[0]),
                "minibatch_samples": self.minibatch,
                "max_response_tokens": longest,
                "task": {"kind": "arithmetic"},
                "verifier": {"kind": "number"},
                "algorithm": {"name": algorithm},
                "sampler": {"tolerance": 100.0},
                "log": {"samples": False, "tensorboard": False},
                "agents": [
                    {"name": name, "model": "bench/shape", **self.fields[name]}
                    for name in self.traces
                ],
            }
        )

    def agents(
        self,
        algorithm: str,
        *,
        behaviour: Mapping[str, Mapping[Key, float]] | None = None,
    ) -> dict[str, Agent]:
        config = self.config(algorithm)
        made = {}
        for agent in config.agents:
            policy = self.policies[agent.name]
            pool = self.pool
            if behaviour is not None:
                pool = ChosenBehaviour(pool, agent.name, behaviour[agent.name])
            trace = self.traces[agent.name]
            shared = Shared(
                config=config,
                run=self.run,
                pool=pool,
                task=TraceTask(trace),
                verifier=TraceVerifier(trace, self.verifiers),  # type: ignore[arg-type]
                algorithm=make_algorithm(config.algorithm, (0.0, 1.0)),
                hooks=Hooks(),
            )
            made[agent.name] = Agent(agent, shared, policy)
        return made

    def ways(self, name: str) -> dict[str, Any]:
        return ways_of(self.policies[name], self.samplers[name])

    def rollouts(self, agent: Agent, step: int) -> list[Rollout]:
        entry = agent.journal.read(step)
        assert entry is not None
        return entry[0]

    def peer_scores(self, learner: str, agents: Mapping[str, Agent], step: int) -> dict[Key, float]:
        """The learner's own mean log-probability of every row of its peer."""
        rows = [r for name, a in agents.items() if name != learner for r in self.rollouts(a, step)]
        scores = self.policies[learner].score(
            [(r.prompt_ids, r.completion.token_ids) for r in rows]
        )
        return {(r.problem_id, r.index): fmean(s) for r, s in zip(rows, scores, strict=True)}

    def close(self) -> None:
        self.verifiers.close()


def take_as_scored(agent: Agent, step: int) -> None:
    """Mark a new agent as the one that scored the step's rollouts, as in a run,
    which was done in this process, at weights that nothing here moves."""
    agent.policy.mark_scored(step, 0.0)


def choose_outside(scores: Mapping[Key, float], share: float) -> dict[Key, float]:
    """Behaviour of each row such that exactly this fraction of them lies outside the trust interval."""
    keys = sorted(scores)
    random.Random(11).shuffle(keys)
    outside = set(keys[: round(share * len(keys))])
    return {key: scores[key] + (OUTSIDE if key in outside else INSIDE) for key in keys}


def agreement_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Of a step's metrics: sampler against trainer, own samples outside the clip."""
    wanted = {
        "agreement/max_gap": "largest_gap",
        "agreement/mean_gap": "mean_gap",
        "own/clipped": "outside_clip",
    }
    return {title: metrics[name] for name, title in wanted.items() if name in metrics}
