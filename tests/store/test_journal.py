"""A journalled step is whole, exact and final."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from breaking import kill_everywhere, names

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
    assert sorted(p.name for p in journal.folder.iterdir()) == [
        "step-000003.jsonl",
        "step-000012.jsonl",
    ]
    assert Journal(journal.folder / "none").steps() == []


def test_a_verdict_once_written_is_final(journal):
    journal.write(12, [rollout()], {"gap": 0.5})
    journal.write(12, [rollout()], {"gap": 0.5})
    for rows, facts in (
        ([rollout(reward=0.0)], {"gap": 0.5}),
        ([rollout(), rollout(index=1)], {"gap": 0.5}),
        ([rollout()], {}),
    ):
        with pytest.raises(UserError, match="step 12 is journalled already"):
            journal.write(12, rows, facts)
    assert journal.read(12) == ([rollout()], {"gap": 0.5})


def test_what_must_not_be_journalled(journal):
    for rows, reason in (
        ([rollout(), rollout()], "twice"),
        ([rollout(step=11)], "is of step 11"),
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
    ("change", "reason"),
    [
        (lambda text: text[:-1], "line 1: the header counts 3 rollouts, found 2"),
        (lambda text: text[: text.rindex("{")], "line 1: the header counts 3 rollouts, found 2"),
        (lambda text: text[: text.index("\n") + 1], "counts 3 rollouts, found 0"),
        (lambda text: text[:20], "line 1: not JSON"),
        (lambda text: "", "line 1: not JSON"),
        (lambda text: text.replace('"reward":1.0', '"reward":0.0', 1), "sha256"),
        (lambda text: text.replace('"agent": "ant"', '"agent": "bee"'), "field agent: 'bee'"),
        (lambda text: text.replace('"step": 12', '"step": 13', 1), "field step: 13, expected 12"),
        (lambda text: text.replace('"schema": 1', '"schema": 9', 1), "field schema: 9"),
        (lambda text: text.replace('"count"', '"number"', 1), "not a journal header"),
        (lambda text: "[]" + text[text.index("\n") :], "not a JSON object"),
    ],
)
def test_a_changed_journal_is_caught(journal, change, reason):
    journal.write(12, [rollout(index=i) for i in range(3)])
    path = journal.path(12)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=reason) as error:
        journal.read(12)
    assert str(path) in str(error.value)


def test_a_field_that_is_wrong_although_the_sum_is_right(journal):
    """A journal made by other hands: the sum is theirs, the field is not ours."""
    journal.write(12, [rollout()])
    path = journal.path(12)
    head, rest = path.read_text().split("\n", 1)
    changed = rest.replace('"index":0', '"index":"0"')
    old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (rest, changed))
    path.write_text(head.replace(old, new) + "\n" + changed)
    with pytest.raises(UserError, match="line 3: field index"):
        journal.read(12)


JOB = """
row = Rollout("q1", 0, 1, (1,), Completion("x" * 20_000, (1,), (-0.5,), Finish.STOP),
              Verdict(1.0, Status.OK))
Journal(folder).write(1, [row])
"""


def test_killed_anywhere(tmp_path):
    """kill -9 after every file operation of a write: the step is there whole or not at all, the
    older one is untouched, and the next write sweeps the rest away."""
    base = tmp_path / "ant"
    Journal(base).write(0, [rollout(step=0)])
    left = kill_everywhere(
        base,
        tmp_path / "copies",
        "from hacrl.store.journal import Journal\nfrom hacrl.types import *",
        JOB.strip(),
    )
    found = []
    for folder in left:
        journal = Journal(folder, agent=folder.name)
        found.append(journal.read(1) is not None)
        assert Journal(folder, agent="ant").read(0) == ([rollout(step=0)], {})
        journal.write(2, [])
        assert not [name for name in names(folder) if name.startswith(".")]
    assert found == sorted(found)
    assert set(found) == {False, True}
