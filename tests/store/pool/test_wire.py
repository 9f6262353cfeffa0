"""Text and back, exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.store.pool.wire import ROLLOUT, WireError, from_json, to_json
from hacrl.types import (
    Completion,
    Finish,
    Rollout,
    Sampling,
    Status,
    Tokens,
    Trajectory,
    Turn,
    Verdict,
)

texts = st.text(max_size=40)  # all of Unicode but surrogates: control characters, NUL, line breaks
floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**53)
verdicts = st.builds(Verdict, reward=floats, status=st.sampled_from(Status), detail=texts)
tokens = st.lists(st.tuples(st.integers(0, 2**31), floats), max_size=6).map(
    lambda pairs: (tuple(i for i, _ in pairs), tuple(p for _, p in pairs))
)

trajectories = st.builds(
    Trajectory,
    problem_id=texts,
    task=texts,
    agent=texts,
    index=counts,
    step=counts,
    policy_version=counts,
    turns=st.lists(st.builds(Turn, texts, texts, st.booleans()), max_size=3).map(tuple),
    finish=st.sampled_from(Finish),
    mean_logprob=st.none() | floats,
    num_tokens=counts,
    verdict=st.none() | verdicts,
    verifier=texts,
    sampling=st.builds(Sampling, floats, counts),
    shareable=st.booleans(),
    tokens=st.none() | st.builds(lambda name, t: Tokens(name, *t), texts, tokens),
    schema=st.just(1),
)


@settings(max_examples=300, deadline=None)
@given(trajectories)
def test_trajectories_come_back_as_they_were(trajectory):
    text = to_json(trajectory)
    back = from_json(text)
    assert back == trajectory
    assert repr(back) == repr(trajectory)  # also -0.0, and types inside tuples
    assert to_json(back) == text
    assert "\n" not in text


@settings(max_examples=100, deadline=None)
@given(texts, tokens, verdicts, st.booleans())
def test_rollouts_come_back_as_they_were(text, tokens, verdict, shareable):
    rollout = Rollout(
        text, 1, 2, (3, 4), Completion(text, *tokens, Finish.STOP), verdict, shareable
    )
    assert repr(ROLLOUT.from_json(ROLLOUT.to_json(rollout))) == repr(rollout)


@pytest.mark.parametrize("place", ["problem_id", "agent", "text"])
@pytest.mark.parametrize("broken", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(row, place, broken):
    trajectory = row(**{"problem" if place == "problem_id" else place: broken})
    with pytest.raises(WireError, match="lone surrogate is not Unicode"):
        to_json(trajectory)
    text = to_json(row(text="HERE")).replace("HERE", "\\ud800")
    with pytest.raises(WireError, match="Invalid JSON"):
        from_json(text)


def test_equal_values_give_equal_text(row):
    """1 and 1.0 are the same reward, so a row with either is the same row."""
    one, other = (replace(row(), verdict=Verdict(reward, Status.OK)) for reward in (1, 1.0))
    assert to_json(one) == to_json(other)
    assert '"reward":1.0,' in to_json(one)


def test_lengths_must_agree(row):
    with pytest.raises(WireError, match=r"tokens\.logprobs"):
        to_json(replace(row(), tokens=Tokens("t", (1, 2), (-0.5,))))
    completion = Completion("a", (1, 2), (-0.5,), Finish.STOP)
    with pytest.raises(WireError, match=r"completion\.logprobs"):
        ROLLOUT.to_json(Rollout("q", 0, 0, (1,), completion))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value):
    completion = Completion("a", (1, 2), (-0.5, value), Finish.STOP)
    with pytest.raises(WireError, match=r"completion\.logprobs\.1"):
        ROLLOUT.to_json(Rollout("q", 0, 0, (1,), completion))


def test_types_are_not_bent(row):
    """A float index, a bool count or a list of turns is a mistake of the writer, not a row."""
    for field, value in {"index": 1.0, "num_tokens": True, "turns": [], "finish": "stop"}.items():
        with pytest.raises(WireError, match=field):
            to_json(replace(row(), **{field: value}))
