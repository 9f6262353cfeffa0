"""One agent's whole step, against TRL's."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hacrl.training.agent import Agent
from speed.floor import Cost, cost_of, rollout_floor, score_floor, update_floor
from speed.measure import Measurement, free, once, peak_gb, reset_peak
from speed.shapes import vocabulary_of
from speed.team import Team, agreement_of
from speed.trl_step import TrlStep, trl_step
from speed.work import Setting, ways_text
from speed.workload import Trace, make_trace


@dataclass(frozen=True)
class StepCase:
    """One agent's step: prompts x 8 replies, `updates` parameter updates on them."""

    shape: str
    prompts: int
    updates: int
    rows: int
    per_device: int
    """TRL's batch of one forward and backward."""
    variant: str = "short"
    scale: float = 1.0


@dataclass(frozen=True)
class OwnStep:
    """hacrl's step: seconds in total and by phase, and further facts."""

    whole: float
    clock: Mapping[str, float]
    metrics: Mapping[str, Any]
    peak_gb: float | None
    cost: Cost
    ways: Mapping[str, Any]
    """How it was done (work.py)."""


def step(setting: Setting, case: StepCase, *, with_trl: bool) -> None:
    """A GSPO step: rollout, verify, score, update, and what is left (idle)."""
    trace = make_trace(case.variant, case.prompts, vocabulary_of(case.shape), scale=case.scale)
    setting.log.say(f"step: building {case.shape}")
    ours = _own_step(setting, case, trace)
    free(setting.device)
    theirs = _trl_step(setting, case, trace) if with_trl else None
    rows = setting.fields.get("sampler_rows", case.rows)
    floors = {
        "rollout": rollout_floor(ours.cost, trace, rows, setting.ceilings),
        "score": score_floor(ours.cost, trace, setting.ceilings),
        "update": update_floor(ours.cost, trace, setting.ceilings),
    }
    named = f"{case.shape}, {case.prompts} x {len(trace.lengths[0])}, {trace.name}"
    clock = ours.clock
    parts = {"rollout": clock["sample"], "score": clock["score"], "update": clock["update"]}
    tokens = {"rollout": trace.reply_tokens, "score": trace.tokens, "update": trace.tokens}
    trls = {} if theirs is None else _phases(theirs)
    for name, seconds in parts.items():
        setting.log.add(
            Measurement(
                f"step: {name}",
                named,
                seconds,
                tokens[name],
                reply_tokens=trace.reply_tokens if name == "rollout" else None,
                against_trl=trls[name] / seconds if trls else None,
                of_floor=floors[name] / seconds,
                facts={"trl_s": trls.get(name)},
            )
        )
    setting.log.add(
        Measurement(
            "step",
            f"{named}, {case.updates} updates",
            ours.whole,
            trace.reply_tokens,
            ours.peak_gb,
            reply_tokens=trace.reply_tokens,
            against_trl=theirs.whole / ours.whole if theirs else None,
            of_floor=sum(floors.values()) / ours.whole,
            note=f"outside the clip at the first update {ours.metrics['own/clipped_first']:.2g}; "
            + ways_text(ours.ways),
            facts={
                **ours.ways,
                **{f"{name}_s": s for name, s in parts.items()},
                "verify_s": clock["verify"],
                "publish_and_view_s": clock["publish"] + clock["samples"],
                "rest_s": clock["offload"],
                "idle_s": ours.whole - sum(clock.values()),
                "trl_s": theirs.whole if theirs else None,
                "trl_peak_gb": theirs.peak_gb if theirs else None,
                "trl_settings": theirs.settings if theirs else None,
                **agreement_of(ours.metrics),
            },
        )
    )


def _trl_step(setting: Setting, case: StepCase, trace: Trace) -> TrlStep:
    setting.log.say("step: TRL")
    return trl_step(
        case.shape, trace, setting.device, updates=case.updates, per_device=case.per_device
    )


def _own_step(setting: Setting, case: StepCase, trace: Trace) -> OwnStep:
    """The third of three steps: CUDA graphs are still captured in the second."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        team = Team(
            {"a": case.shape},
            {"a": trace},
            Path(folder),
            setting.device,
            minibatch=len(trace.rows) // case.updates,
            fields={"a": {"sampler_rows": case.rows, **setting.fields}},
        )
        stack.callback(team.close)
        agent = team.agents("gspo")["a"]
        for number in (0, 1, 2):
            agent.clock.read()
            reset_peak(setting.device)
            whole, metrics = once(partial(_alone, team, agent, number), setting.device)
            setting.log.say(f"step {number}: {whole:.2f} s")
        cost = cost_of(team.policies["a"].model)
        return OwnStep(
            whole, agent.clock.read(), metrics, peak_gb(setting.device), cost, team.ways("a")
        )


def _phases(trl: TrlStep) -> dict[str, float]:
    return {"rollout": trl.generate, "score": trl.score, "update": trl.update}


def _alone(team: Team, agent: Agent, number: int) -> dict[str, Any]:
    metrics = agent.rollout(number)
    team.pool.close(number, [agent.name])
    return metrics | agent.learn(number)
