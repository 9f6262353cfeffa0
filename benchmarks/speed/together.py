"""Two agents on one device: a joint step against two separate ones, and the paper's pair."""

import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hacrl.training.agent import Agent
from speed.measure import Measurement, alloc_retries, once, peak_gb, reset_peak
from speed.shapes import vocabulary_of
from speed.team import GivenReplies, Key, Team, agreement_of, choose_outside, take_as_scored
from speed.work import Setting, ways_text
from speed.workload import Trace, make_trace

PHASES = ("rollout-a", "rollout-b", "learn-a", "learn-b")


@dataclass(frozen=True)
class PairCase:
    """Two agents: prompts x 8 replies each, minibatches of `minibatch` samples."""

    shapes: tuple[str, str]
    prompts: int
    minibatch: int
    rows: int
    variant: str = "short"
    scale: float = 1.0
    shares: tuple[float, ...] = (0.0, 0.35, 0.6)
    microbatch: tuple[int, int] = (16384, 16384)
    """Tokens of each agent's micro-batches."""

    def traces(self) -> dict[str, Trace]:
        return {
            name: make_trace(
                self.variant, self.prompts, vocabulary_of(shape), agent=i, scale=self.scale
            )
            for i, (name, shape) in enumerate(zip("ab", self.shapes, strict=True))
        }


def joint(setting: Setting, case: PairCase) -> None:
    """A joint HACPO step over two separate GSPO steps on the same rollouts, by the fraction of peers'
    rows without gradient."""
    setting.log.say(f"joint: building {' + '.join(case.shapes)}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        team = _pair_team(setting, case, case.traces(), Path(folder))
        stack.callback(team.close)
        _joint(setting, case, team)


def _joint(setting: Setting, case: PairCase, team: Team) -> None:
    device, traces = setting.device, team.traces
    agents = team.agents("gspo")
    _warm_rollouts(team, agents)
    rolled = 0.0
    facts: dict[str, Any] = {}
    for name, agent in agents.items():
        took, metrics = once(partial(agent.rollout, 1), device)
        setting.log.say(f"joint: rollout of {name}: {took:.2f} s")
        rolled += took
        found_facts = agreement_of(metrics) | team.ways(name)
        facts |= {f"{key}_{name}": value for key, value in found_facts.items()}
    team.pool.close(1, list(agents))
    scores = {name: team.peer_scores(name, agents, 1) for name in agents}
    setting.log.say("joint: learning, warm-up")
    _learn(team.agents("gspo"), device)
    alone, alone_facts, peak = _learn(team.agents("gspo"), device, setting.repeats)
    named = f"{' + '.join(case.shapes)}, {case.prompts} x 8, {traces['a'].name}"
    tokens = sum(t.tokens for t in traces.values())
    add = setting.log.add
    ways = "; ".join(f"{name}: {ways_text(team.ways(name))}" for name in agents)
    add(Measurement("joint", f"{named}: rollouts of both", rolled, note=ways, facts=facts))
    title = f"{named}: two GSPO steps, learning"
    add(Measurement("joint", title, alone, tokens, peak, facts=alone_facts))
    for share in case.shares:
        behaviour = {name: choose_outside(s, share) for name, s in scores.items()}
        arm = team.agents("hacpo", behaviour=behaviour)
        seconds, learned, peak = _learn(arm, device, setting.repeats)
        ratio, step = seconds / alone, (rolled + seconds) / (rolled + alone)
        bound = 1.1 * (1 + (3 - 2 * share) / 3)
        ratios = {"learning_ratio": ratio, "bound": bound, "step_ratio": step}
        note = f"learning {ratio:.2f} of two alone (bound {bound:.2f}), step {step:.2f}"
        title = f"{named}: joint HACPO, learning, p = {share:g}"
        facts = {**ratios, **learned}
        add(Measurement("joint", title, seconds, 2 * tokens, peak, note=note, facts=facts))


def _pair_team(setting: Setting, case: PairCase, traces: Mapping[str, Trace], folder: Path) -> Team:
    fields = {
        name: {"sampler_rows": case.rows, "microbatch_tokens": tokens, **setting.fields}
        for name, tokens in zip("ab", case.microbatch, strict=True)
    }
    return Team(
        dict(zip("ab", case.shapes, strict=True)),
        traces,
        folder,
        setting.device,
        minibatch=case.minibatch,
        fields=fields,
    )


def _warm_rollouts(team: Team, agents: Mapping[str, Agent]) -> None:
    """Rollouts that are thrown away, so that captures and compiles are done."""
    for name, agent in agents.items():
        team.samplers[name].sample(team.traces[name].requests(0, name), 1.0)
        agent.rollout(0)
    team.pool.close(0, list(agents))


def _learn(
    agents: Mapping[str, Agent], device: torch.device, repeats: int = 1, number: int = 1
) -> tuple[float, dict[str, Any], float | None]:
    """Both agents' learning phases in turn, the faster of up to two times."""
    reset_peak(device)
    refused = alloc_retries(device)
    best: tuple[float, dict[str, Any]] | None = None
    for _ in range(min(2, repeats)):
        total, facts = 0.0, {}
        for name, agent in agents.items():
            agent.clock.read()
            take_as_scored(agent, number)
            took, metrics = once(partial(agent.learn, number), device)
            total += took
            clock = agent.clock.read()
            facts[f"learn_{name}_s"] = took
            facts[f"view_{name}_s"] = clock["samples"]
            facts[f"update_{name}_s"] = clock["update"]
            facts[f"rest_{name}_s"] = clock["offload"]
            facts[f"own_clipped_{name}"] = metrics["own/clipped"]
            facts[f"own_clipped_first_{name}"] = metrics["own/clipped_first"]
            if "peers/used" in metrics:
                facts[f"peers_used_{name}"] = metrics["peers/used"]
        if best is None or total < best[0]:
            best = total, facts
    assert best is not None
    best[1]["alloc_retries"] = alloc_retries(device) - refused  # of all repeats
    return *best, peak_gb(device)


def pair(
    setting: Setting,
    case: PairCase,
    *,
    phases: Iterable[str] = PHASES,
    limit_s: float = 1e9,
    share: float = 0.0,
) -> None:
    """One HACPO training step of two agents resident together: time and peak of each phase.

    A rollout that is not among the phases is replaced by random replies of the same lengths, so that
    the learning phases can be measured in another call. No warm-up: a phase takes what it takes.
    """
    start = time.perf_counter()
    setting.log.say(f"pair: building {' + '.join(case.shapes)}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        team = _pair_team(setting, case, case.traces(), Path(folder))
        stack.callback(team.close)
        _pair(setting, case, team, set(phases), start + limit_s, share)


def _pair(
    setting: Setting,
    case: PairCase,
    team: Team,
    wanted: set[str],
    until: float,
    share: float,
) -> None:
    device, traces = setting.device, team.traces
    named = f"{' + '.join(case.shapes)}, {case.prompts} x 8, {traces['a'].name}"
    agents = team.agents("gspo")
    total = 0.0
    for name, agent in agents.items():
        if f"rollout-{name}" not in wanted:
            team.policies[name].sampler = GivenReplies(team.samplers[name], traces[name])
        reset_peak(device)
        took, metrics = once(partial(agent.rollout, 0), device)
        if f"rollout-{name}" in wanted:
            total += took
            _tell_phase(setting, f"{named}: rollout-{name}", took, team, agent, metrics)
    team.pool.close(0, list(agents))
    for name in agents:
        if f"learn-{name}" not in wanted:
            continue
        if time.perf_counter() > until:
            setting.log.say(f"pair: learn-{name} left out, the time is spent")
            continue
        setting.log.say(f"pair: scoring peers for {name}, outside of the step")
        behaviour: dict[str, dict[Key, float]] = {other: {} for other in agents if other != name}
        behaviour[name] = choose_outside(team.peer_scores(name, agents, 0), share)
        learner = team.agents("hacpo", behaviour=behaviour)[name]
        take_as_scored(learner, 0)
        reset_peak(device)
        took, metrics = once(partial(learner.learn, 0), device)
        total += took
        moves = _later_moves(learner, device)
        _tell_phase(setting, f"{named}: learn-{name}", took, team, learner, metrics, moves)
    if wanted == set(PHASES):
        setting.log.add(Measurement("pair", f"{named}: whole step", total))


def _later_moves(agent: Agent, device: torch.device) -> dict[str, float]:
    """Seconds of the moves between device and host in later steps. The first move to the host also
    allocates pinned memory, so it takes longer. Empty for an agent that is not offloaded."""
    offloader = agent.policy.offloader
    if not offloader.offloaded:
        return {}
    back, _ = once(offloader.begin_update, device)
    away, _ = once(offloader.end_updates, device)
    return {"later_from_host_s": back, "later_to_host_s": away}


def _tell_phase(
    setting: Setting,
    case: str,
    seconds: float,
    team: Team,
    agent: Agent,
    metrics: Mapping[str, Any],
    moves: Mapping[str, float] | None = None,
) -> None:
    ways = team.ways(agent.name)
    clock = {f"{name}_s": s for name, s in agent.clock.read().items()}
    setting.log.add(
        Measurement(
            "pair",
            case,
            seconds,
            team.traces[agent.name].reply_tokens,
            peak_gb(setting.device),
            note=ways_text(ways),
            facts={**clock, **(moves or {}), **agreement_of(metrics), **ways},
        )
    )
