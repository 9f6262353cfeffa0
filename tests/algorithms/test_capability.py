from __future__ import annotations

import pytest

from hacrl.algorithms.capability import CapabilityHistory, CapabilitySettings
from hacrl.types import Finish, Group, Sampling, Snapshot, Status, Trajectory, Turn, Verdict


def trajectory(agent: str, reward: float, task: str, step: int, status=Status.OK) -> Trajectory:
    return Trajectory(
        problem_id=f"{task}-q",
        task=task,
        agent=agent,
        index=0,
        step=step,
        policy_version=0,
        turns=(Turn("assistant", "x", True),),
        finish=Finish.STOP,
        mean_logprob=-1.0,
        num_tokens=1,
        verdict=Verdict(reward, status),
        verifier="test/1",
        sampling=Sampling(1.0, 4),
        shareable=True,
    )


def cut(step: int, **rewards: float) -> Snapshot:
    rows = tuple(trajectory(a, r, "t", step) for a, r in rewards.items())
    return Snapshot(step, tuple(rewards), (Group("t-q", "t", rows),))


def history_of(read, **settings) -> CapabilityHistory:
    return CapabilityHistory(read, CapabilitySettings(**settings))


def test_window_counts_only_steps_with_the_agent_present() -> None:
    """b is absent at step 1: its window of 2 at step 3 is steps 3 and 2, at step 2 steps 2 and 0."""
    cuts = [cut(0, a=0.1, b=0.9), cut(1, a=0.2), cut(2, a=0.3, b=0.5), cut(3, a=0.4, b=0.7)]
    history = history_of(cuts.__getitem__, capability_window=2)
    at = history.at(cuts[3], ("a", "b"))
    assert (at.of("a"), at.of("b")) == (pytest.approx(0.35), pytest.approx(0.6))
    at = history.at(cuts[2], ("a", "b"))
    assert (at.of("a"), at.of("b")) == (pytest.approx(0.25), pytest.approx(0.7))


def test_without_the_current_step() -> None:
    cuts = [cut(0, a=0.5, b=1.0), cut(1, a=1.0, b=0.0)]
    history = history_of(cuts.__getitem__, window_includes_step=False)
    assert history.at(cuts[1], ("a", "b")).ratio("b", "a") == 2.0
    assert history.at(cuts[0], ("a", "b")).ratio("b", "a") == 1.0


def test_a_cut_is_read_from_the_pool_once() -> None:
    """The one at hand never, an earlier one when a window first reaches back to it."""
    cuts = [cut(step, a=0.5, b=1.0) for step in range(6)]
    read: list[int] = []

    def gather(step: int) -> Snapshot:
        read.append(step)
        return cuts[step]

    history = history_of(gather, capability_window=3)
    for now in cuts[3:]:
        history.at(now, ("a", "b"))
    assert read == [2, 1]


def test_by_task() -> None:
    """a is good at add, b at mul: the ratio turns round with the task."""
    rows = {
        "add": (trajectory("a", 1.0, "add", 0), trajectory("b", 0.5, "add", 0)),
        "mul": (trajectory("a", 0.25, "mul", 0), trajectory("b", 1.0, "mul", 0)),
    }
    one = Snapshot(0, ("a", "b"), tuple(Group(f"{t}-q", t, r) for t, r in rows.items()))
    capability = history_of(lambda _: one, capability_by="task").at(one, ("a", "b"))
    assert capability.ratio("a", "b", "add") == 2.0
    assert capability.ratio("a", "b", "mul") == 0.25


def test_guards_and_unjudged() -> None:
    rows = (
        trajectory("a", 0.0, "t", 0),
        trajectory("b", 1.0, "t", 0),
        trajectory("c", 1.0, "t", 0, Status.TIMEOUT),
    )
    one = Snapshot(0, ("a", "b", "c"), (Group("t-q", "t", rows),))
    capability = history_of(lambda _: one).at(one, one.members)
    assert capability.ratio("a", "b") == 0.1
    assert capability.ratio("b", "a") == 10.0
    assert capability.of("c") is None  # a broken verifier does not make a weak model
    assert capability.ratio("c", "b") == 1.0
