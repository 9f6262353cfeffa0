"""A journalled step is complete, exact and final."""

import hashlib
from dataclasses import replace

import pytest

from hacrl.errors import UserError
from hacrl.store.journal import Journal
from hacrl.types import Completion, Finish, Rollout, Status, Verdict


def rollout(problem="q1", index=0, step=12, text="42", reward=1.0):
    return Rollout(
        problem_id=problem,
        index=index,
        step=step,
        prompt_ids=(1, 9),
        completion=Completion(text, (7, 5, 2), (-0.1, -1 / 3, -5e-324), Finish.STOP),
        verdict=Verdict(reward, Status.OK, "42"),
    )


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "ant")


def test_what_is_read_is_what_was_written(journal):
    """Odd ids and texts, exact floats, the order as given."""
    odd = ["b/..\\ \n\0", "a\u2028\u0085", "", "日本 \U0001f41c"]
    rows = [rollout(problem, i, text=problem) for problem in odd for i in (1, 0)]
    facts = {"agreement/max_gap": 0.1 + 0.2}
    journal.write(12, rows, facts)
    assert journal.read(12) == (rows, facts)
    assert repr(journal.read(12)[0]) == repr(rows)
    assert journal.read(11) is None
    journal.write(3, [])
    assert journal.read(3) == ([], {})
    assert journal.steps() == [3, 12]
    assert Journal(journal.folder / "none").steps() == []


def test_a_journalled_step_is_final(journal):
    for _ in range(2):
        journal.write(12, [rollout()], {"gap": 0.5})
    for rows, facts in (
        ([rollout(reward=0.0)], {"gap": 0.5}),
        ([rollout(), rollout(index=1)], {"gap": 0.5}),
        ([rollout()], {}),
    ):
        with pytest.raises(UserError, match="step 13 is already in the journal"):
            journal.write(12, rows, facts)
    assert journal.read(12) == ([rollout()], {"gap": 0.5})


def test_what_must_not_be_journalled(journal):
    for rows, reason in (
        ([rollout(), rollout()], "twice"),
        ([rollout(step=11)], "is of step 12"),
        ([replace(rollout(), verdict=None)], "no verdict"),
        ([rollout(text="\ud800")], "surrogate"),
        ([rollout(reward=float("nan"))], "verdict.reward"),
    ):
        with pytest.raises(ValueError, match=f"problem 'q1', index 0.*{reason}"):
            journal.write(12, rows)
    skipped = Completion("", (), (), Finish.NOT_ATTEMPTED)
    journal.write(12, [replace(rollout(), completion=skipped, verdict=None)])
    with pytest.raises(ValueError, match="JSON"):
        journal.write(13, [], {"gap": float("nan")})
    assert journal.steps() == [12]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text[: text.rindex("{")],
        lambda text: text[: text.index("\n") + 1],
        lambda text: "",
        lambda text: text.replace('"reward":1.0', '"reward":0.0', 1),
        lambda text: text.replace('"agent": "ant"', '"agent": "bee"'),
        lambda text: text.replace('"step": 12', '"step": 13', 1),
        lambda text: text.replace('"schema": 2', '"schema": 9', 1),
    ],
)
def test_a_changed_journal_is_noticed(journal, change):
    journal.write(12, [rollout(index=i) for i in range(3)])
    path = journal.path(12)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=f"{path}: .*hacrl resume"):
        journal.read(12)


def test_a_wrong_field_with_a_right_digest_is_noticed(journal):
    journal.write(12, [rollout()])
    path = journal.path(12)
    head, rest = path.read_text().split("\n", 1)
    changed = rest.replace('"index":0', '"index":"0"')
    old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (rest, changed))
    path.write_text(head.replace(old, new) + "\n" + changed)
    with pytest.raises(UserError, match="field index"):
        journal.read(12)
