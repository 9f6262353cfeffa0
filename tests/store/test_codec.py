"""Encoding to JSON and back is exact; invalid values are refused by field."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import make_row

from hacrl.store.codec import ROLLOUT, TRAJECTORY, CodecError
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
trajectories = st.builds(  # other fields by their types
    Trajectory,
    index=counts,
    step=counts,
    policy_version=counts,
    num_tokens=counts,
    mean_logprob=st.none() | floats,
    verdict=st.none() | verdicts,
    sampling=st.builds(Sampling, floats, counts),
    tokens=st.none() | st.builds(lambda name, t: Tokens(name, *t), texts, tokens),
)


@settings(max_examples=300, deadline=None)
@given(trajectories)
def test_a_trajectory_is_read_back_exactly(trajectory):
    line = TRAJECTORY.encode(trajectory)
    back = TRAJECTORY.decode(line)
    assert back == trajectory
    assert repr(back) == repr(trajectory)  # also -0.0, and types inside tuples
    assert TRAJECTORY.encode(back) == line
    assert b"\n" not in line
    found = json.loads(line)
    assert list(found) == sorted(found) and list(found["sampling"]) == ["limit", "temperature"]
    assert b" " not in TRAJECTORY.encode(make_row())


@settings(max_examples=100, deadline=None)
@given(texts, tokens, verdicts, st.booleans())
def test_a_rollout_is_read_back_exactly(text, tokens, verdict, shareable):
    completion = Completion(text, *tokens, Finish.STOP)
    rollout = Rollout(text, 1, 2, (3, 4), completion, verdict, shareable)
    assert repr(ROLLOUT.decode(ROLLOUT.encode(rollout))) == repr(rollout)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("field index: ", {"index": 1.0}),
        ("field index: ", {"index": -1}),
        ("field turns: ", {"turns": []}),
        ("field finish: ", {"finish": "stop"}),
        ("field schema: ", {"schema": 2}),
        ("field mean_logprob: ", {"mean_logprob": math.nan}),
        ("field verdict.reward: ", {"verdict": Verdict(math.inf, Status.OK)}),
        ("field tokens.logprobs: ", {"tokens": Tokens("t", (1, 2), (-0.5,))}),
        ("surrogates not allowed", {"problem_id": "\ud800"}),
        ("surrogates not allowed", {"turns": (Turn("assistant", "a\udfffb", True),)}),
    ],
)
def test_invalid_trajectories_are_refused(words, changes):
    with pytest.raises(CodecError, match=words):
        TRAJECTORY.encode(replace(make_row(), **changes))


def test_invalid_rollouts_are_refused():
    for field, logprobs in (("logprobs", (-0.5,)), ("logprobs.1", (-0.5, -math.inf))):
        completion = Completion("a", (1, 2), logprobs, Finish.STOP)
        with pytest.raises(CodecError, match=f"field completion.{field}: "):
            ROLLOUT.encode(Rollout("q", 0, 0, (1,), completion))


def changed(**fields):
    return lambda line: json.dumps({**json.loads(line), **fields}).encode()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("Invalid JSON", lambda line: line[:-5]),
        ("Invalid JSON", lambda line: line.replace(b"42", b"\\ud800")),
        ("object", lambda line: b"7.5"),
        ("surprise", changed(surprise=1)),
        ("verdict.surprise", changed(verdict={"reward": 1.0, "status": "ok", "surprise": 1})),
        ("turns.0.text", changed(turns=[{"role": "a", "text": 3, "generated": True}])),
        ("num_tokens", changed(num_tokens=-3)),
        ("finish", changed(finish="bored")),
        ("schema", changed(schema=2)),
        ("mean_logprob", lambda line: line.replace(b"-0.1", b"-1e999")),
    ],
)
def test_invalid_lines_are_refused(field, change):
    with pytest.raises(CodecError, match=field):
        TRAJECTORY.decode(change(TRAJECTORY.encode(make_row())))
