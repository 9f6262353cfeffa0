"""What a person should know about a data file, and how its answers are read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from problem_files import rows, task_of

from hacrl.errors import UserError


def test_rows_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    """1+1 has the answers 2 and 3; 2+2 has one answer, written twice."""
    pairs = [("1+1", "2"), ("1+1", "3"), ("2+2", "4"), ("2+2", " 4"), ("3+3", "6")]
    data = [{"question": question, "answer": answer} for question, answer in pairs]
    (note,) = task_of(tmp_path, data, held_out_fraction=0).notes
    assert note.startswith("1 prompt of train.jsonl with more than one answer")
    assert note.endswith("The first: '1+1' has 2 and 3")


def test_a_held_out_problem_that_is_there_several_times_is_named(tmp_path: Path) -> None:
    """Some benchmark files have every problem 32 times."""
    held_out = [{"id": i, "question": "2 + 2?", "answer": "4"} for i in range(3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (note,) = task_of(tmp_path, rows(2), held_out="test.jsonl").notes
    assert note.startswith("2 rows of 3 in test.jsonl: the same prompt as another row")


def test_a_whole_number_from_a_spreadsheet_is_written_as_one(tmp_path: Path) -> None:
    answers = [42.0, 0.5, "42.0", -3.0, 7]
    data = [{"id": i, "question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    found = {p.id: p.answer for p in task_of(tmp_path, data, held_out_fraction=0).batch(0, 5)}
    assert [found[str(i)] for i in range(5)] == ["42", "0.5", "42.0", "-3", "7"]


def test_the_answer_in_the_prompt_is_named(tmp_path: Path) -> None:
    """Also under its name in the file."""
    data = [{"question": "1+1", "gold": "2"}]
    for prompt, shown in (("{question}={answer}", "{answer}"), ("{question} {gold}", "{gold}")):
        options = {"columns": {"answer": "gold"}, "prompt": prompt, "held_out_fraction": 0}
        (note,) = task_of(tmp_path, data, **options).notes
        assert f"shows {shown}, the reference answer, to the model" in note
    assert task_of(tmp_path, rows(2), held_out_fraction=0).notes == ()


def test_prompts_that_the_question_does_not_tell_apart_are_named(tmp_path: Path) -> None:
    """The split compares questions. Three reviews share a question, so they are one problem."""
    texts = ["good", "bad", "fine"]
    data = [{"question": "Is it praise?", "text": text, "answer": "yes"} for text in texts]
    same = r"3 prompts of train.jsonl ask the same question .* in task.columns.question"
    with pytest.raises(UserError, match=same):
        task_of(tmp_path, data, prompt="{text} {question}")
    more = [*data, {"question": "Is it long?", "text": "no", "answer": "no"}]
    (note,) = task_of(tmp_path, more, prompt="{text} {question}", held_out_fraction=0).notes
    assert re.match(same, note)
    columns = {"question": "text"}
    read = task_of(tmp_path, more, prompt="{text}", columns=columns, held_out_fraction=0)
    assert read.notes == ()


def test_an_exclude_file_that_names_no_problem_is_named(tmp_path: Path) -> None:
    (tmp_path / "issues.jsonl").write_text('{"id": "1"}\n{"id": "2"}\n')
    options: dict[str, Any] = {"held_out_fraction": 0, "exclude": "issues.jsonl"}
    (note,) = task_of(tmp_path, rows(5), **options).notes
    assert note.startswith("task.exclude leaves nothing out") and note.endswith("like 'r0'")
