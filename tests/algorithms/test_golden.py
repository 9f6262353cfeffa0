"""The thirteen worked cases of HACPO, made by an independent implementation in plain floats."""

import json
from functools import partial
from pathlib import Path

import pytest
from by_hand import batch_of, gradient, reply

from hacrl.algorithms import Step, make_algorithm, make_settings
from hacrl.algorithms.capability import ALL_TASKS, Capability, CapabilityHistory, CapabilitySettings
from hacrl.algorithms.functional import deviation
from hacrl.types import Group, MicroBatch, Sample, Snapshot, Update

CASES = json.loads((Path(__file__).parent.parent / "golden" / "hacpo_cases.json").read_text())[
    "cases"
]
CLOSE = {"rel": 0, "abs": 1e-9}


def name(agent: int) -> str:
    return f"agent-{agent}"


def groups_of(case: dict, step: int) -> tuple[Group, ...]:
    return tuple(
        Group(
            f"q{p}",
            "t",
            tuple(
                reply(name(a), reward, i, problem=f"q{p}", step=step)
                for a, rewards in enumerate(by_agent)
                for i, reward in enumerate(rewards)
            ),
        )
        for p, by_agent in enumerate(case["rewards"])
    )


def earlier_step(case: dict, step: int) -> Snapshot:
    """An earlier step in which each agent's mean reward is the one the case gives."""
    group = Group(
        "h",
        "t",
        tuple(reply(name(a), past[step], step=step) for a, past in enumerate(case["history"])),
    )
    members = tuple(name(a) for a in range(case["agents"]))
    return Snapshot(step, members, (group,))


def capability_of(case: dict) -> Capability:
    now = len(case["history"][0])
    members = tuple(name(a) for a in range(case["agents"]))

    names = ("capability_window", "omega_min", "omega_max")
    window, low, high = (case["settings"][name] for name in names)
    history = CapabilityHistory(
        partial(earlier_step, case),
        CapabilitySettings(capability_window=window, ratio_min=low, ratio_max=high),
    )
    return history.at(Snapshot(now, members, groups_of(case, now)), members)


def hacpo_of(case: dict, **changes):
    s = case["settings"]
    settings = make_settings(
        alpha=s["alpha"],
        floor=1 - s["delta"],
        last_floor=1 - s["delta"],
        epsilon_low=s["epsilon_low"],
        epsilon_high=s["epsilon_high"],
        capability_window=s["capability_window"],
        **changes,
    )
    return make_algorithm(settings)


def samples_of(case: dict) -> list[Sample]:
    learner = case["learner"]
    return [
        Sample(f"q{p}", i, name(a), a == learner, (1, 2), (0, 1), logprob)
        for p, by_agent in enumerate(case["source_mean_logprob"])
        for a, logprobs in enumerate(by_agent)
        for i, logprob in enumerate(logprobs)
    ]


def flat(nested) -> list[float]:
    return [x for by_agent in nested for xs in by_agent for x in xs]


def rows(samples: list[Sample], logprobs: list[float]) -> MicroBatch:
    return batch_of(
        [[x] for x in logprobs],
        [s.is_own for s in samples],
        behaviour=[s.behaviour for s in samples],
        advantage=[s.advantage for s in samples],
        weight=[s.weight for s in samples],
    )


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_golden_case(case: dict) -> None:
    expected, learner, agents = case["expected"], name(case["learner"]), range(case["agents"])
    groups = groups_of(case, len(case["history"][0]))
    capability = capability_of(case)
    hacpo = hacpo_of(case)

    found = {
        "capability": [capability.of(name(a), ALL_TASKS) for a in agents],
        "omega_baseline": [capability.ratio(learner, name(a)) for a in agents],
        "omega_credit": [capability.ratio(name(a), learner) for a in agents],
        "baseline": [hacpo.baseline(g, capability, learner) for g in groups],
        "sigma": [deviation([t.reward for t in g.judged]) for g in groups],
    }
    for key, values in found.items():
        assert values == pytest.approx(expected[key], **CLOSE), key

    samples = hacpo.credit(Step(learner, samples_of(case), groups, capability))
    assert [s.advantage for s in samples] == pytest.approx(flat(expected["advantage"]), **CLOSE)

    delta_step = case["settings"]["delta_step"]
    floor = 1 - case["settings"]["delta"] + case["update"] * delta_step
    assert floor == pytest.approx(expected["peer_floor"], **CLOSE)
    update = Update(case["update"], floor, "mixed", ())

    logprobs = flat(case["learner_mean_logprob"])
    batch = rows(samples, logprobs)
    output = hacpo.loss(batch, update)
    assert output.ratio_B.tolist() == pytest.approx(flat(expected["ratio"]), **CLOSE)
    assert output.loss.item() == pytest.approx(expected["loss_mixture_mean"], **CLOSE)
    assert [-g * len(samples) for (g,) in gradient(output, batch)] == pytest.approx(
        flat(expected["d_objective_d_mean_logprob"]), **CLOSE
    )
    assert (output.weight_B * batch.advantage_B).tolist() == pytest.approx(
        flat(expected["d_objective_d_mean_logprob"]), **CLOSE
    )

    paper = hacpo_of(case, normaliser="paper").loss(batch, update)
    assert paper.loss.item() == pytest.approx(expected["loss_paper_sum"], **CLOSE)

    # One row at a time, with the divisor of the whole, the losses are the objectives themselves.
    for row, objective in enumerate(flat(expected["objective"])):
        one = rows(samples[row : row + 1], logprobs[row : row + 1])
        assert -hacpo.loss(one, update).loss.item() == pytest.approx(objective, **CLOSE)
