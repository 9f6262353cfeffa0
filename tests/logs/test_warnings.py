"""Warnings about lost data, learners without signal, and learners that become worse."""

from pathlib import Path
from typing import Any

import pytest

from hacrl.config import parse_config
from hacrl.logs.warnings import AgentWatch, VerifierWatch
from hacrl.store.rundir import RunDirectory

Rows = list[dict[str, Any]]


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


def train(step: int, agent: str = "ant", **values: Any) -> dict[str, Any]:
    """A train row; "__" in a name stands for "/"."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"kind": "train", "step": step, "agent": agent, **named}


def peers(step: int, used: float, below: float = 0.9, n: int = 64, **other: Any) -> dict[str, Any]:
    values = {"peers__forwarded": n, "peers__used": used, "peers__below_floor": below}
    return train(step, **values, **other)


def evaluated(step: int, accuracy: float, half: float = 0.02, **values: Any) -> dict[str, Any]:
    interval = {"accuracy/low": accuracy - half, "accuracy/high": accuracy + half}
    row = {"kind": "evaluation", "step": step, "agent": "ant", "accuracy": accuracy}
    return {**row, **interval, "problems": 300, **values}


def warnings(run: RunDirectory, rows: Rows) -> list[str]:
    watch = AgentWatch(run)
    return [sentence for one in rows for sentence in watch.look([one])]


def test_samples_count_not_steps(run: RunDirectory) -> None:
    """4 of 40 and 0 of 4 x 10: 5 %, where the mean of the steps is 2 %. One sample less is too few."""
    others = [peers(s, 0.0, n=10) for s in range(1, 5)]
    assert warnings(run, [peers(0, 4 / 40, n=40), *others]) == []
    assert len(warnings(run, [peers(0, 3 / 40, n=40), *others])) == 1


DROPS = {"samples__drop__empty": 10, "samples__drop__empty__ant": 9, "samples__drop__empty__cow": 1}
DROPS |= {"samples__drop__too_long": 4, "samples__drop__too_long__cow": 4}
NO_SIGNAL = {"own__samples": 8, "reward": 0.0}
IDLE = {"updates": 0, "updates_skipped": 0, "verdict__timeout": 1, "rollouts": 99}
CASES = [
    (
        [train(1, **IDLE, verdict__ok=98, not_attempted=0, samples__drop__truncated=6.0)],
        "agent 'ant' made no update in step 2: 1 of 99 rollouts could not be judged, 0 prompts too "
        "long, 6 truncated samples left out (mask_truncated), 0 updates skipped because not finite.",
    ),
    (
        [evaluated(0, 0.0, truncated=0.9)],
        "agent 'ant': 90 % of its replies to held-out problems reached "
        "evaluation.max_response_tokens = 8 and were truncated, often before an answer. The limit in "
        "training is 4096.",
    ),
    (
        [train(s, reward=0.1 * s, verdict__ok=0) for s in range(9)],
        "agent 'ant': no reply in the 5 steps up to step 5 got the largest reward of the verifier, so "
        "none counts as right (largest mean reward of a step: 0.4).",
    ),
    (
        [peers(s, 0.01) for s in range(9)],
        "ant learns almost nothing from its peers: only 1.0 % of their samples had a gradient in "
        "the 5 steps up to step 5. 90 % had a ratio below the floor.",
    ),
    (  # it may begin later, and the floor need not be the reason
        [peers(s, 0.5 if s < 5 else 0.0, below=0.1) for s in range(20)],
        "ant learns almost nothing from its peers: only 0.0 % of their samples had a gradient in "
        "the 5 steps up to step 10. `hacrl compare`",
    ),
    (
        [train(s, samples__kept__cow=3, samples__dropped__cow=5, **DROPS) for s in range(9)],
        "agent 'ant' could not use 25 of its peers' 40 replies in the 5 steps up to step 5. Most "
        "frequent reason: samples/drop/too_long (20 times)",
    ),
    (
        [train(0, not_attempted=0), train(1, not_attempted=5), train(2, not_attempted=7)],
        "agent 'ant' left out 5 of 128 problems in step 2: prompts longer than "
        "max_prompt_tokens = 1024.",
    ),
    (
        [train(1, not_attempted=5, replayed=3)],
        "agent 'ant' has no stored reply to 5 of 128 problems in step 2.",
    ),
    (
        [evaluated(0, 0.4, not_attempted=3), evaluated(1, 0.4, not_attempted=3)],
        "agent 'ant': 3 held-out prompts longer than max_prompt_tokens = 1024, counted as not",
    ),
    (
        [train(s, truncated=0.3) for s in range(9)],
        "agent 'ant': 30 % of its replies in the 5 steps up to step 5 reached "
        "max_response_tokens = 4096",
    ),
    (
        [train(s, **NO_SIGNAL, own__advantage_zero=1.0 if s else 0.9) for s in range(9)],
        "agent 'ant' had no training signal in the 5 steps up to step 6: all replies to a problem "
        "got the same reward (mean reward 0)",
    ),
    (
        [evaluated(s, 0.4 - 0.03 * s) for s in range(6)],
        "agent 'ant' has become worse: held-out accuracy 34.0 % after step 2, but 40.0 % before "
        "training. A lower learning_rate (now 1e-06) may prevent this.",
    ),
]


@pytest.mark.parametrize(("rows", "start"), CASES)
def test_each_loss_is_named_once_with_count_key_and_value(
    run: RunDirectory, rows: Rows, start: str
) -> None:
    """FIRST_HOUR 3, 13. Other agents are not warned about, and a resumed run repeats nothing, unless it
    went back before the warning."""
    (sentence,) = warnings(run, rows)
    assert sentence.startswith(start)
    run.add_metrics(rows)
    assert warnings(run, [{**row, "step": row["step"] + len(rows)} for row in rows]) == []
    assert len(warnings(run, [{**row, "agent": "bee"} for row in rows])) == 1
    run.rewind(0)
    assert len(warnings(run, rows)) == 1


QUIET = {
    "few held-out truncated": [evaluated(0, 0.0, truncated=0.25)],
    "right once": [train(s, reward=0.1, verdict__ok=s == 2) for s in range(5)],
    "never any reward": [train(s, reward=0.0, verdict__ok=0) for s in range(9)],
    "a tenth is used": [peers(s, 0.1) for s in range(9)],
    "no peers": [peers(s, 0.0, n=0) for s in range(9)],
    "few truncated": [train(s, truncated=0.25) for s in range(9)],
    "truncated for four steps": [train(s, truncated=1.0) for s in range(4)],
    "signal from peers": [
        train(s, **NO_SIGNAL, own__advantage_zero=1.0, peers__forwarded=s % 5)
        | {"peers/used": 1.0, "peers/below_floor": 0.0}
        for s in range(9)
    ],
    "own": [train(s, samples__kept__ant=1, samples__dropped__ant=9) for s in range(9)],
    "noise": [evaluated(0, 0.4, 0.05), *(evaluated(s, 0.3, 0.05) for s in (1, 2))],
    "small": [evaluated(0, 0.4, 0.001), evaluated(1, 0.36, 0.001)],
    "without a start": [evaluated(1, 0.4), evaluated(2, 0.0)],
}


@pytest.mark.parametrize("rows", QUIET.values(), ids=QUIET)
def test_small_losses_are_not_warned_about(run: RunDirectory, rows: Rows) -> None:
    assert warnings(run, rows) == []


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
    failed = "the verifier 'number' failed on"
    assert [note.partition(" of 100 replies")[0] for note in notes] == [
        f"ant, step 1: {failed} 2",
        f"ant, step 3: {failed} 8",
        f"ant, step 5: {failed} 60",
    ]
    assert "(1 error, 1 timeout; first error: Value\\x1b[1mError: boom)" in notes[0]
    run.add_metrics(rows)
    assert VerifierWatch(run).look([judged(6, 99)]) == []


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (8, "all replies to a problem got the same"),
        (
            1,
            "with samples_per_prompt = 1 hacpo has no other reply to compare a reward with. Raise it.",
        ),
    ],
)
def test_a_run_of_fewer_steps_is_warned_at_its_end(
    samples: int, reason: str, tmp_path: Path
) -> None:
    """A trial of two steps with a reward that is always 0 says so. Peers need five steps."""
    tree: dict[str, Any] = {
        "steps": 2,
        "samples_per_prompt": samples,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number"},
    }
    config = parse_config({**tree, "agents": [{"name": "ant", "model": "pocket:wren"}]})
    run = RunDirectory.create(tmp_path / "run", config)
    rows = [train(s, **NO_SIGNAL, own__advantage_zero=1.0) for s in range(2)]
    (sentence,) = warnings(run, rows)
    start = "agent 'ant' had no training signal in the 2 steps up to step 2: "
    assert sentence.startswith(start + reason)
    assert warnings(run, [peers(s, 0.0) for s in range(2)]) == []
