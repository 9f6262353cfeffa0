"""Samples of a learner from a snapshot, and the counts of dropped replies."""

from functools import cache
from pathlib import Path

import pytest
from rows import make_row

from hacrl.algorithms import Needs
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.training.samples import DropReason, SampleMaker, SampleReport
from hacrl.types import (
    Completion,
    Finish,
    Group,
    Message,
    Problem,
    Rollout,
    Sample,
    Status,
    Tokens,
    Trajectory,
    Turn,
    Verdict,
)

FIXTURES = Path(__file__).parents[1] / "text" / "tokenizers"
PROBLEMS = {
    "q1": Problem("q1", (Message("user", "What is 17 + 25?"),), "42", "add"),
    "q2": Problem("q2", (Message("user", "What is 3 + 4?"),), "7", "add"),
}
LOGPROB = Needs("logprob")
RIGHT = Verdict(1.0, Status.OK)


@cache
def renderer(name: str = "bytes", reply_start: str = "") -> Renderer:
    return Renderer(load_tokenizer(FIXTURES / name), RenderSettings(reply_start=reply_start))


def peer(
    text: str, index: int = 0, agent: str = "bee", begun: str = "", **other: object
) -> Trajectory:
    turns = (Turn("assistant", text, True),)
    if begun:
        turns = (Turn("assistant", begun, False), *turns)
    fields = {"turns": turns, "mean_logprob": -0.5, "num_tokens": 4, **other}
    return make_row(agent, index=index, **fields)


def own(index: int, reply: tuple[int, ...], problem: str = "q1") -> Rollout:
    prompt = renderer().prompt(PROBLEMS[problem].messages)
    logprobs = tuple(-0.1 * (n + 1) for n in range(len(reply)))
    return Rollout(problem, index, 3, prompt, Completion("?", reply, logprobs, Finish.STOP), RIGHT)


def own_row(rollout: Rollout, **other: object) -> Trajectory:
    ids = rollout.completion.token_ids
    return peer(
        "?",
        rollout.index,
        "ant",
        problem_id=rollout.problem_id,
        finish=rollout.completion.finish,
        num_tokens=len(ids),
        **other,
    )


def samples_of(
    *trajectories: Trajectory,
    rollouts: tuple[Rollout, ...] = (),
    with_renderer: Renderer | None = None,
    needs: Needs = LOGPROB,
    prompt: int = 200,
    limit: int = 50,
    **options: object,
) -> tuple[list[Sample], SampleReport]:
    ids = dict.fromkeys(t.problem_id for t in trajectories)
    groups = [Group(i, "add", tuple(t for t in trajectories if t.problem_id == i)) for i in ids]
    maker = SampleMaker(with_renderer or renderer(), "ant", needs, prompt, limit, **options)
    return maker.make(groups, rollouts, PROBLEMS)


def reason(*args: Trajectory, **kwargs: object) -> DropReason:
    """The one reason for which the one trajectory was dropped."""
    samples, report = samples_of(*args, **kwargs)
    assert samples == []
    [((source, why), count)] = report.drops.items()
    assert (source, count) == (args[0].agent, 1)
    return why


def test_own_sample_is_the_ids_as_sampled() -> None:
    """(33, 33, 2) is no canonical split of anything; -0.1, -0.2, -0.3 have the mean -0.2."""
    rollout = own(0, (33, 33, 2))
    [sample], report = samples_of(own_row(rollout, shareable=False), rollouts=(rollout,))
    n = len(rollout.prompt_ids)
    assert sample.token_ids == (*rollout.prompt_ids, 33, 33, 2)
    assert sample.loss_mask == (0,) * n + (1, 1, 1)
    assert sample.is_own
    assert sample.source == "ant"
    assert sample.behaviour == pytest.approx(-0.2)
    assert sample.old_logprobs == rollout.completion.logprobs
    assert report.kept == {"ant": 1}


def test_peer_sample_is_my_prompt_its_text_and_my_end_token() -> None:
    r = renderer()
    stopped, cut_off = samples_of(peer("so 42"), peer("so 42", 1, finish=Finish.LENGTH))[0]
    prompt = r.prompt(PROBLEMS["q1"].messages)
    body = r.continuation(prompt, "so 42")
    assert body is not None
    assert stopped.token_ids == (*prompt, *body, 2)
    assert cut_off.token_ids == (*prompt, *body)
    assert not stopped.truncated and not cut_off.truncated  # whole, as its author left it
    assert stopped.loss_mask == (0,) * len(prompt) + (1,) * (len(body) + 1)
    assert (stopped.behaviour, stopped.old_logprobs, stopped.is_own) == (-0.5, None, False)


def test_end_token_is_the_one_my_rollouts_end_with() -> None:
    """Two rollouts end with <|endoftext|> (0), one with the template's <|im_end|> (2)."""
    both = Renderer(load_tokenizer(FIXTURES / "bytes"), RenderSettings(), end_ids=[0, 2])
    rollouts = (own(0, (33, 0)), own(1, (33, 0)), own(2, (33, 2)))
    samples, report = samples_of(peer("7"), rollouts=rollouts, with_renderer=both)
    assert samples[0].token_ids[-1] == 0
    assert report.metrics()["samples/end_token"] == 0.0


def test_order_is_snapshot_order_own_first_then_source_and_index() -> None:
    rollouts = (own(1, (33, 2)), own(0, (34, 2)), own(0, (35, 2), problem="q2"))
    rows = [own_row(r) for r in rollouts]
    crowd = [peer("x", 1, "cat"), peer("x", 0, "cat"), peer("x", 1, "bee"), peer("x", 0, "bee")]
    samples, _ = samples_of(peer("x", 0, "cat", problem_id="q2"), *crowd, *rows, rollouts=rollouts)
    found = [(s.problem_id, s.source, s.index) for s in samples]
    both = [("q1", source, i) for source in ("ant", "bee", "cat") for i in (0, 1)]
    assert found == [("q2", "ant", 0), ("q2", "cat", 0), *both]


LATE = Verdict(0.0, Status.TIMEOUT)
NOTHING = {"turns": (), "finish": Finish.NOT_ATTEMPTED, "verdict": None, "mean_logprob": None}


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (peer("7", verdict=LATE), {}, "not_judged"),
        (peer("7", verdict=Verdict(0.0, Status.ERROR)), {}, "not_judged"),
        (peer("", **NOTHING), {}, "not_attempted"),
        (peer("7", shareable=False), {}, "not_shareable"),
        (peer("日本"), {"with_renderer": renderer("narrow")}, "not_renderable"),
        (peer("7 " * 60), {}, "too_long"),
        (peer("7"), {"prompt": 5}, "too_long"),
        (peer("7", mean_logprob=None), {}, "no_logprob"),
        (peer("", finish=Finish.LENGTH), {}, "empty"),
        (peer("7", finish=Finish.LENGTH), {"mask_truncated": True}, "truncated"),
        (peer("It is 42"), {"with_renderer": renderer(reply_start="The answer")}, "begun_reply"),
        (own_row(own(0, (33, 2)), verdict=LATE), {"rollouts": (own(0, (33, 2)),)}, "not_judged"),
        (own_row(own(0, ())), {"rollouts": (own(0, ()),)}, "empty"),
        (own_row(own(0, (33, 2))), {}, "invalid"),  # not in the journal
    ],
)
def test_every_reason(row: Trajectory, options: dict, expected: str) -> None:
    assert reason(row, **options) == expected


def test_rollout_outside_the_snapshot_is_not_used() -> None:
    counted, late = own(0, (33, 2)), own(1, (34, 2))
    samples, _ = samples_of(own_row(counted), rollouts=(counted, late))
    assert [s.index for s in samples] == [0]


def test_what_is_kept() -> None:
    """A reply without an answer is judged. Log-probabilities may be missing if nobody needs them. An
    empty reply that stopped is one end token."""
    assert len(samples_of(peer("7", verdict=Verdict(0.0, Status.UNPARSED)))[0]) == 1
    [sample], _ = samples_of(peer("7", mean_logprob=None), needs=Needs("text"))
    assert sample.behaviour is None
    [sample], _ = samples_of(peer(""))
    assert sample.num_reply_tokens == 1 and sample.token_ids[-1] == 2


def test_without_peers_only_own_and_no_drop() -> None:
    rollout = own(0, (33, 2))
    samples, report = samples_of(
        own_row(rollout), peer("7", shareable=False), rollouts=(rollout,), needs=Needs("none")
    )
    assert [s.source for s in samples] == ["ant"]
    assert report.drops.total() == 0


@pytest.mark.parametrize(
    ("theirs", "text", "mine", "rest"),
    [
        ("The answer is", " 42", "The answer is", " 42"),  # the same: continue it
        ("", "The answer is 42", "The answer is", " 42"),  # written by the peer itself
        ("The answer", " is 42", "The answer is", " 42"),  # partly begun, partly written
        ("The answer is", " 42", "", "The answer is 42"),  # I begin with nothing: all of it
    ],
)
def test_begun_replies(theirs: str, text: str, mine: str, rest: str) -> None:
    r = renderer(reply_start=mine)
    [sample], _ = samples_of(peer(text, begun=theirs), with_renderer=r)
    prompt = r.prompt(PROBLEMS["q1"].messages)
    assert sample.token_ids[: len(prompt)] == prompt
    assert r.text(prompt, sample.token_ids[len(prompt) :]) == (rest, True)


def test_too_long_may_be_truncated_at_a_whole_character() -> None:
    """x日本 is 1 + 3 + 3 byte tokens and an end token: 8. Cut to 6 it keeps x日, 4 tokens."""
    r = renderer()
    short = {"limit": 6, "too_long": "truncate"}
    [sample], report = samples_of(peer("x日本"), **short)
    prompt = r.prompt(PROBLEMS["q1"].messages)
    assert r.text(prompt, sample.token_ids[len(prompt) :]) == ("x日", True)
    assert sample.num_reply_tokens == 4
    assert sample.truncated
    assert report.metrics()["samples/truncated"] == 1.0
    assert report.metrics()["samples/token_ratio/bee"] == 8 / 4  # of the whole reply
    # Cut by the end token alone: 8 > 7, and no end token remains.
    [nearly], _ = samples_of(peer("x日本"), **{**short, "limit": 7})
    assert nearly.num_reply_tokens == 7 and nearly.truncated
    # A reply that its author did not finish may be truncated again: both are LENGTH.
    [twice], _ = samples_of(peer("x日本", finish=Finish.LENGTH), **short)
    assert twice.truncated
    # Where truncated replies are masked, one truncated here is too.
    assert reason(peer("x日本"), **short, mask_truncated=True) is DropReason.TOO_LONG


def test_token_ratio_over_kept_samples() -> None:
    """x日 and x are 4 + 1 and 1 + 1 of my tokens with the end token: 7, against 2 + 5 = 7 and, for
    cat, 2 against 1. What is dropped does not count."""
    _, report = samples_of(
        peer("x日", 0, num_tokens=2),
        peer("x", 1, num_tokens=5),
        peer("x", 2, num_tokens=100, shareable=False),
        peer("x", 0, "cat", num_tokens=1),
    )
    metrics = report.metrics()
    assert metrics["samples/token_ratio/bee"] == 1.0
    assert metrics["samples/token_ratio/cat"] == 2.0


def test_metrics_name_every_reason_always() -> None:
    metrics = samples_of(peer("7"))[1].metrics()
    assert {f"samples/drop/{r}" for r in DropReason} <= set(metrics)
    assert sum(metrics[f"samples/drop/{r}"] for r in DropReason) == 0.0
    assert metrics["samples/kept/bee"] == 1.0
    assert metrics["samples/dropped/bee"] == 0.0
    dropped = samples_of(peer("7", shareable=False), peer("8", 1))[1].metrics()
    assert dropped["samples/drop/not_shareable"] == 1.0
    assert dropped["samples/dropped/bee"] == 1.0
    assert all(isinstance(v, float) for v in dropped.values())


# ---------------------------------------------------------------- for algorithms that need tokens


def test_tokens_are_taken_as_they_are() -> None:
    """Letter by letter is not how I would split "the", and 0 is not the end token I would put."""
    r = renderer()
    prompt = r.prompt(PROBLEMS["q1"].messages)
    letters = tuple(i for c in "the" for i in (r.continuation(prompt, c) or ()))
    tokens = Tokens(r.vocabulary_hash, (*letters, 0), (-0.1, -0.2, -0.3, -0.4))
    rollout = own(0, (33, 33, 2))
    mine, theirs = samples_of(
        own_row(rollout), peer("the", tokens=tokens), rollouts=(rollout,), needs=Needs("tokens")
    )[0]
    assert theirs.token_ids == (*prompt, *letters, 0)
    assert theirs.source_logprobs == (-0.1, -0.2, -0.3, -0.4)
    assert theirs.loss_mask == (0,) * len(prompt) + (1,) * 4
    assert mine.source_logprobs == rollout.completion.logprobs
    # Nobody asks: the text, and no log-probabilities.
    [plain], _ = samples_of(peer("the", tokens=tokens))
    assert plain.source_logprobs is None
    assert plain.token_ids != theirs.token_ids


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"tokens": Tokens("sha256:other", (33, 2), (-0.1, -0.2))}, "other_vocabulary"),
        ({"tokens": None, "tokenizer": "sha256:other"}, "other_vocabulary"),
        ({"tokens": None, "tokenizer": renderer().vocabulary_hash}, "no_logprob"),
        ({"begun": "The"}, "begun_reply"),
        ({"shareable": False}, "not_shareable"),
        ({"tokens": Tokens(renderer().vocabulary_hash, (), ()), "finish": Finish.LENGTH}, "empty"),
    ],
)
def test_tokens_that_cannot_be_taken(row: dict, expected: str) -> None:
    tokens = Tokens(renderer().vocabulary_hash, (33, 2), (-0.1, -0.2))
    assert reason(peer("x", **{"tokens": tokens, **row}), needs=Needs("tokens")) == expected


def test_tokens_too_long_are_dropped_or_cut_with_their_logprobs() -> None:
    r = renderer()
    tokens = Tokens(r.vocabulary_hash, (*(33,) * 8, 2), tuple(-0.1 * i for i in range(9)))
    given = peer("x", tokens=tokens)
    assert reason(given, limit=6, needs=Needs("tokens")) is DropReason.TOO_LONG
    [sample], report = samples_of(given, limit=6, needs=Needs("tokens"), too_long="truncate")
    assert sample.num_reply_tokens == 6
    assert sample.source_logprobs == tokens.logprobs[:6]
    assert report.truncated == 1
