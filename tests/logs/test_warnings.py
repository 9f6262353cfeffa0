"""Warnings about lost data, learners without signal, and learners that become worse."""

from pathlib import Path
from typing import Any

import pytest

from hacrl.config import parse_config
from hacrl.logs.warnings import (
    DROPPED,
    WATCHES,
    VerifierWatch,
    collapse,
    dropped_peers,
    idle,
    long_held_out,
    long_prompts,
    never_right,
    no_signal,
    truncated,
    truncated_held_out,
    unused_peers,
)
from hacrl.store.rundir import RunDirectory
from hacrl.training.samples import DropReason


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    settings = {
        "steps": 9,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
        "evaluation": {"max_response_tokens": 8},
        "agents": [{"name": n, "model": "pocket:wren"} for n in ("ant", "bee")],
    }
    return RunDirectory.create(tmp_path / "run", parse_config(settings))


def row(
    step: int, used: float, below: float = 0.9, agent: str = "ant", n: int = 64
) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "agent": agent,
        "peers/forwarded": n,
        "peers/used": used,
        "peers/below_floor": below,
    }


def warnings(run: RunDirectory, rows: list[dict[str, Any]], make: Any = unused_peers) -> list[str]:
    watch = make(run)
    return [sentence for one in rows for sentence in watch.look([one])]


def test_each_learner_is_warned_about_once_after_five_steps(run: RunDirectory) -> None:
    """bee uses a tenth of its peers' samples: that is something."""
    rows = [row(s, u, agent=a) for s in range(9) for a, u in (("ant", 0.01), ("bee", 0.1))]
    watch = unused_peers(run)
    found = {}
    for step in range(9):
        for sentence in watch.look(rows[2 * step : 2 * step + 2]):
            found[step] = sentence
    assert list(found) == [4]
    assert found[4].startswith(
        "ant learns almost nothing from its peers: only 1.0 % of their samples had a gradient in "
        "the 5 steps up to step 5. 90 % had a ratio below the floor."
    )


def test_samples_count_not_steps(run: RunDirectory) -> None:
    """4 of 40 and 0 of 4 x 10: 5 %, where the mean of the steps is 2 %. One sample less is too few."""
    others = [row(s, 0.0, n=10) for s in range(1, 5)]
    assert warnings(run, [row(0, 4 / 40, n=40), *others]) == []
    assert len(warnings(run, [row(0, 3 / 40, n=40), *others])) == 1


def test_steps_without_peers_and_evaluations_do_not_count(run: RunDirectory) -> None:
    alone = [row(s, 0.0, n=0) for s in range(9)]
    evaluations = [{**row(s, 0.0), "kind": "evaluation"} for s in range(9)]
    none = [{"kind": "train", "step": s, "agent": "ant"} for s in range(9)]
    assert warnings(run, [*alone, *evaluations, *none, *[row(s, 0.0) for s in range(4)]]) == []


def test_it_may_begin_later_and_the_floor_need_not_be_the_reason(run: RunDirectory) -> None:
    rows = [row(s, 0.5) for s in range(5)] + [row(s, 0.0, below=0.1) for s in range(5, 20)]
    (sentence,) = warnings(run, rows)
    assert "up to step 10." in sentence and "floor" not in sentence


def test_a_resumed_run_does_not_repeat_it(run: RunDirectory) -> None:
    rows = [row(s, 0.0) for s in range(6)]
    run.add_metrics(rows)
    assert warnings(run, [row(6, 0.0)]) == []
    run.rewind(3)  # back before the warning
    assert len(warnings(run, [row(3, 0.0), row(4, 0.0)])) == 1


def train(step: int, **values: Any) -> dict[str, Any]:
    """A train row; "__" in a name stands for "/"."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"kind": "train", "step": step, "agent": "ant", **named}


def evaluated(step: int, accuracy: float, half: float = 0.02) -> dict[str, Any]:
    interval = {"accuracy/low": accuracy - half, "accuracy/high": accuracy + half}
    row = {"kind": "evaluation", "step": step, "agent": "ant", "accuracy": accuracy}
    return {**row, **interval, "problems": 300}


IDLE = {"updates": 0, "updates_skipped": 0, "verdict/timeout": 1, "verdict/error": 0}
CASES = [
    (
        idle,
        [train(1, **IDLE, rollouts=9, not_attempted=2, samples__drop__truncated=6.0)],
        "agent 'ant' made no update in step 2: 1 of 9 rollouts could not be judged, 2 prompts too "
        "long, 6 truncated samples left out (mask_truncated), 0 updates skipped because not finite.",
    ),
    (
        truncated_held_out,
        [{**evaluated(0, 0.0), "truncated": 0.9}],
        "agent 'ant': 90 % of its replies to held-out problems reached "
        "evaluation.max_response_tokens = 8 and were truncated, often before an answer. The limit in "
        "training is 4096.",
    ),
    (
        never_right,
        [train(s, reward=0.1 * s, verdict__ok=0) for s in range(9)],
        "agent 'ant': no reply in the 5 steps up to step 5 got the largest reward of the verifier, so "
        "none counts as right (largest mean reward of a step: 0.4).",
    ),
    (
        long_prompts,
        [train(0, not_attempted=0), train(1, not_attempted=5), train(2, not_attempted=7)],
        "agent 'ant' left out 5 of 128 problems in step 2: prompts longer than "
        "max_prompt_tokens = 1024.",
    ),
    (
        long_prompts,
        [train(1, not_attempted=5, replayed=3)],
        "agent 'ant' has no stored reply to 5 of 128 problems in step 2.",
    ),
    (
        long_held_out,
        [{**evaluated(0, 0.4), "not_attempted": 3}, {**evaluated(1, 0.4), "not_attempted": 3}],
        "agent 'ant': 3 held-out prompts longer than max_prompt_tokens = 1024, counted as not",
    ),
    (
        truncated,
        [train(s, truncated=0.3) for s in range(9)],
        "agent 'ant': 30 % of its replies in the 5 steps up to step 5 reached "
        "max_response_tokens = 4096",
    ),
    (
        no_signal,
        [
            train(s, own__samples=8, own__advantage_zero=1.0 if s else 0.9, reward=0.0)
            for s in range(9)
        ],
        "agent 'ant' had no training signal in the 5 steps up to step 6: all replies to a problem "
        "got the same reward (mean reward 0)",
    ),
    (
        dropped_peers,
        [
            train(
                s,
                **{"samples__kept__cow": 3, "samples__dropped__cow": 5},
                **{"samples__drop__too_long": 4, "samples__drop__empty": 1},
            )
            for s in range(9)
        ],
        "agent 'ant' could not use 25 of its peers' 40 replies in the 5 steps up to step 5. Most "
        "frequent reason (too_long, 20 times): in this agent's tokens the reply is longer than "
        "max_response_tokens",
    ),
    (
        collapse,
        [evaluated(s, 0.4 - 0.03 * s) for s in range(6)],
        "agent 'ant' has become worse: held-out accuracy 34.0 % after step 2, but 40.0 % before "
        "training. A lower learning_rate (now 1e-06) may prevent this.",
    ),
]


@pytest.mark.parametrize(("watch", "rows", "start"), CASES)
def test_each_loss_is_named_once_with_count_key_and_value(
    run: RunDirectory, watch: Any, rows: list[dict[str, Any]], start: str
) -> None:
    """FIRST_HOUR 3, 13. Other agents are not warned about, and a resumed run repeats nothing."""
    assert watch in WATCHES
    (sentence,) = warnings(run, rows, watch)
    assert sentence.startswith(start)
    run.add_metrics(rows)
    assert warnings(run, [{**row, "step": row["step"] + len(rows)} for row in rows], watch) == []
    assert len(warnings(run, [{**row, "agent": "bee"} for row in rows], watch)) == 1


QUIET = [
    (truncated_held_out, [{**evaluated(0, 0.0), "truncated": 0.25}]),
    (never_right, [train(s, reward=0.1, verdict__ok=s == 2) for s in range(5)]),
    (never_right, [train(s, reward=0.0, verdict__ok=0) for s in range(9)]),
    (long_prompts, [train(s, not_attempted=0) for s in range(9)]),
    (truncated, [train(s, truncated=0.25) for s in range(9)]),
    (truncated, [train(s, truncated=1.0) for s in range(4)]),
    (
        no_signal,
        [
            train(s, own__samples=8, own__advantage_zero=1.0, reward=0.0, peers__forwarded=s % 5)
            for s in range(9)
        ],
    ),
    (
        dropped_peers,
        [train(s, samples__kept__ant=1, samples__dropped__ant=9) for s in range(9)],
    ),
    (collapse, [evaluated(0, 0.4, 0.05), *(evaluated(s, 0.3, 0.05) for s in (1, 2))]),
    (collapse, [evaluated(0, 0.4, 0.001), evaluated(1, 0.36, 0.001)]),
    (collapse, [evaluated(1, 0.4), evaluated(2, 0.0)]),
]
"""Below the limits, too short, with signal from peers, own samples, noise, small, without a start."""


@pytest.mark.parametrize(("watch", "rows"), QUIET)
def test_small_losses_are_not_warned_about(
    run: RunDirectory, watch: Any, rows: list[dict[str, Any]]
) -> None:
    assert warnings(run, rows, watch) == []


def test_every_reason_of_a_dropped_reply_has_a_text() -> None:
    assert set(DROPPED) == set(DropReason)


def test_replies_that_are_not_judged_are_named_at_most_thrice(run: RunDirectory) -> None:
    """FIRST_HOUR 1: any in the first step, then more than 5 %, then more than half; a resumed run
    does not repeat it."""

    def judged(step: int, errors: int, kind: str = "train") -> dict[str, Any]:
        counts = {"verdict/ok": 100 - errors, "verdict/error": errors - errors // 2}
        first = {"verdict/first_failure": "error: Value\x1b[1mError: boom"} if errors else {}
        row = {"kind": kind, "step": step, "agent": "ant"}
        return {**row, **counts, "verdict/timeout": errors // 2, **first}

    rows = [judged(0, 0, "evaluation"), judged(0, 2), judged(1, 3), judged(2, 8), judged(3, 9)]
    rows += [judged(4, 60), judged(4, 70, "evaluation"), judged(5, 99)]
    watch = VerifierWatch(run)
    notes = [sentence for row in rows for sentence in watch.look([row])]
    assert notes == [
        "ant, step 1: the verifier 'number' failed on 2 of 100 replies (1 error, 1 timeout; first "
        "error: Value\\x1b[1mError: boom). These replies count neither in the reward nor in the "
        "accuracy.",
        *notes[1:],
    ]
    starts = [note.partition(" replies")[0] for note in notes[1:]]
    failed = "the verifier 'number' failed on"
    assert starts == [f"ant, step 3: {failed} 8 of 100", f"ant, step 5: {failed} 60 of 100"]
    run.add_metrics(rows)
    assert VerifierWatch(run).look([judged(6, 99)]) == []
