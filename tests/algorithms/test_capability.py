import pytest
from by_hand import reply

from hacrl.algorithms.capability import CapabilityHistory, CapabilitySettings
from hacrl.types import Group, Snapshot, Status


def snapshot(step: int, **rewards: float) -> Snapshot:
    rows = tuple(reply(a, r, step=step) for a, r in rewards.items())
    return Snapshot(step, tuple(rewards), (Group("q", "t", rows),))


def history_of(read, **settings) -> CapabilityHistory:
    return CapabilityHistory(read, CapabilitySettings(**settings))


def test_window_counts_only_steps_with_the_agent_present() -> None:
    """b is absent at step 1: its window of 2 at step 3 is steps 3 and 2, at step 2 steps 2 and 0."""
    steps = [
        snapshot(0, a=0.1, b=0.9),
        snapshot(1, a=0.2),
        snapshot(2, a=0.3, b=0.5),
        snapshot(3, a=0.4, b=0.7),
    ]
    history = history_of(steps.__getitem__, capability_window=2)
    at = history.at(steps[3], ("a", "b"))
    assert (at.of("a"), at.of("b")) == (pytest.approx(0.35), pytest.approx(0.6))
    at = history.at(steps[2], ("a", "b"))
    assert (at.of("a"), at.of("b")) == (pytest.approx(0.25), pytest.approx(0.7))


def test_without_the_current_step() -> None:
    steps = [snapshot(0, a=0.5, b=1.0), snapshot(1, a=1.0, b=0.0)]
    history = history_of(steps.__getitem__, window_includes_step=False)
    assert history.at(steps[1], ("a", "b")).ratio("b", "a") == 2.0
    assert history.at(steps[0], ("a", "b")).ratio("b", "a") == 1.0


def test_a_snapshot_is_read_from_the_pool_once() -> None:
    """The one at hand never, an earlier one when a window first reaches back to it."""
    steps = [snapshot(step, a=0.5, b=1.0) for step in range(6)]
    reads: list[int] = []

    def read(step: int) -> Snapshot:
        reads.append(step)
        return steps[step]

    history = history_of(read, capability_window=3)
    for now in steps[3:]:
        history.at(now, ("a", "b"))
    assert reads == [2, 1]


def test_by_task() -> None:
    """a is good at add, b at mul: the ratio turns round with the task."""
    rows = {
        "add": (reply("a", 1.0, task="add"), reply("b", 0.5, task="add")),
        "mul": (reply("a", 0.25, task="mul"), reply("b", 1.0, task="mul")),
    }
    one = Snapshot(0, ("a", "b"), tuple(Group(f"{t}-q", t, r) for t, r in rows.items()))
    capability = history_of(lambda _: one, capability_by="task").at(one, ("a", "b"))
    assert capability.ratio("a", "b", "add") == 2.0
    assert capability.ratio("a", "b", "mul") == 0.25


def test_guards_and_unjudged() -> None:
    rows = (
        reply("a", 0.0, task="t"),
        reply("b", 1.0, task="t"),
        reply("c", 1.0, status=Status.TIMEOUT),
    )
    one = Snapshot(0, ("a", "b", "c"), (Group("t-q", "t", rows),))
    capability = history_of(lambda _: one).at(one, one.members)
    assert capability.ratio("a", "b") == 0.1
    assert capability.ratio("b", "a") == 10.0
    assert capability.of("c") is None  # a broken verifier does not make a weak model
    assert capability.ratio("c", "b") == 1.0
