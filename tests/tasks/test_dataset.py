"""Problems from files: columns, template, split, dealing, error messages."""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_files import made, rows, task_of, write_lines
from pydantic import ValidationError

from hacrl.errors import UserError
from hacrl.tasks import TaskConfig, make_task
from hacrl.tasks.dataset import normalised
from hacrl.tasks.deck import Deck
from hacrl.types import Message, Problem


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3), st.integers(1, 40))
def test_every_epoch_deals_everything_once_and_no_step_twice(
    size: int, count: int, seed: int, steps: int
) -> None:
    """Also where a step crosses into the next epoch: its parts of both epochs are different."""
    count = min(count, size)
    deck = Deck([f"p{i}" for i in range(size)], seed)
    dealt = [deck.deal(step, count) for step in range(steps)]
    assert all(len(set(one)) == count for one in dealt)
    flat = [i for one in dealt for i in one]
    for start in range(0, len(flat) - size + 1, size):
        assert sorted(flat[start : start + size]) == list(range(size))
    # A pure function of (seed, step): the same in any order of calls.
    again = Deck(deck.ids, seed)
    assert [again.deal(step, count) for step in reversed(range(steps))] == dealt[::-1]


def test_seeds_and_epochs_differ() -> None:
    first = Deck([f"p{i}" for i in range(50)], 0)
    assert first.deal(0, 50) != first.deal(1, 50)
    assert first.deal(0, 50) != Deck(first.ids, 1).deal(0, 50)


def test_a_row_becomes_a_problem(tmp_path: Path) -> None:
    data = [{"n": 7, "problem": "2 + 2 = {?}", "gold": 4, "area": "sums", "hint": "count"}]
    names = {"question": "problem", "answer": "gold", "id": "n", "task": "area"}
    prompt = "{question}\nHint: {hint}. Use \\boxed{{}}."
    task = task_of(tmp_path, data, held_out_fraction=0, columns=names, prompt=prompt)
    message = Message("user", "2 + 2 = {?}\nHint: count. Use \\boxed{}.")
    columns = {"area": "sums", "hint": "count"}
    assert task.batch(0, 1) == [Problem("7", (message,), "4", "sums", columns)]
    assert task.batch(0, 1)[0].asked == {"n": 7, "problem": "2 + 2 = {?}", "gold": 4}
    blank = [{**data[0], "area": " "}]
    task = task_of(tmp_path, blank, held_out_fraction=0, columns=names, prompt=prompt)
    assert task.batch(0, 1)[0].task == task.name  # "" would be all tasks in capability


def test_gz_and_parquet_hold_the_same_problems_as_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    data = rows(20)
    plain = task_of(tmp_path, data)
    write_lines(tmp_path / "train.jsonl.gz", data)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), tmp_path / "train.parquet")
    for name in ("train.jsonl.gz", "train.parquet"):
        other = made(TaskConfig(kind="jsonl", train=name), tmp_path)
        assert other.train == plain.train
        assert other.kept_out == plain.kept_out


@pytest.mark.parametrize(("kind", "source"), [("parquet", "t/train.parquet"), ("hub", "t")])
def test_short_floats_are_the_numbers_that_were_written(
    kind: str, source: str, tmp_path: Path
) -> None:
    """0.1 with 32 bits is 0.10000000149011612 with 64, which is not the answer 1/10."""
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    answers = {"single": pyarrow.float32(), "half": pyarrow.float16(), "double": pyarrow.float64()}
    columns: dict[str, Any] = {name: pyarrow.array([0.1], type_) for name, type_ in answers.items()}
    (tmp_path / "t").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.table({"question": ["q"], **columns}), tmp_path / "t/train.parquet"
    )
    for answer in answers:
        config = {"kind": kind, "train": source, "columns": {"answer": answer}}
        (problem,) = made(TaskConfig(**config, held_out_fraction=0), tmp_path).train
        assert problem.answer == "0.1"


def test_csv_holds_the_same_problems_and_ids_as_jsonl(tmp_path: Path) -> None:
    """Quotes, commas, line ends and a byte order mark; ids by content."""
    data = [
        {"question": 'Say "a, b"\nthen 1', "answer": "1", "hint": "ä"},
        {"question": "2 + 2?", "answer": "4", "hint": ""},
    ]
    plain = task_of(tmp_path, data, held_out_fraction=0)
    text = 'question,answer,hint\r\n"Say ""a, b""\nthen 1",1,ä\r\n\r\n2 + 2?,4,\r\n'
    (tmp_path / "train.csv").write_bytes(("\ufeff" + text).encode())
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(text.encode()))
    for kind, name in (("csv", "train.csv"), ("jsonl", "train.csv.gz")):
        other = made(TaskConfig(kind=kind, train=name, held_out_fraction=0), tmp_path)
        assert other.train == plain.train


def chat(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["system"] * (first == "system") + ["user", "assistant"] * 3
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def test_a_conversation_becomes_a_problem(tmp_path: Path) -> None:
    data = [
        {"messages": chat("1 + 1?", "2"), "hint": "count"},
        {"messages": chat("Be brief.", "1 + 2?", "3", "And twice that?", first="system")},
    ]
    data[1] |= {"answer": 6, "hint": "double"}
    with pytest.raises(UserError, match=r"line 1: column 'answer' .* does not exist"):
        task_of(tmp_path, [{"messages": chat("1 + 1?")}])
    prompt = "{question} ({hint})"
    task = task_of(tmp_path, data, held_out_fraction=0, prompt=prompt)
    one, two = task.train
    assert (one.messages, one.answer) == ((Message("user", "1 + 1? (count)"),), "2")
    assert one.columns == {"hint": "count"}
    assert [m.content for m in two.messages] == [
        "Be brief.", "1 + 2?", "3", "And twice that? (double)",
    ]  # fmt: skip
    assert two.answer == "6" and re.fullmatch("train-[0-9a-f]{16}", two.id)


def test_conversations_are_split_by_their_whole_text(tmp_path: Path) -> None:
    """The same last question after another beginning is another problem."""
    write_lines(tmp_path / "test.jsonl", [{"prompt": chat("3?", "3", "Twice?"), "answer": "6"}])
    data = [{"prompt": chat(f"{i}?", f"{i}", "Twice?"), "answer": f"{2 * i}"} for i in (3, 4)]
    task = task_of(tmp_path, data, held_out="test.jsonl", columns={"messages": "prompt"})
    assert [p.answer for p in task.train] == ["8"]
    assert task.facts["left_out_same_question_held_out"] == 1


def test_a_folder_dataset_is_read_like_one_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "train.jsonl", rows(12))
    write_lines(folder / "test.jsonl", [{"id": "t", "question": "3 + 1?", "answer": "4"}])
    config = TaskConfig(kind="hub", train="folder", held_out_split="test")
    task = made(config, tmp_path)
    assert [p.id for p in task.held_out(None)] == ["t"]
    assert task.facts["left_out_same_question_held_out"] == 1
    assert {p.id for p in task.train} == {f"r{i}" for i in range(12)} - {"r3"}
    with pytest.raises(UserError, match="split 'nope'"):
        made(config.model_copy(update={"held_out_split": "nope"}), tmp_path)


def test_rows_without_ids_are_named_by_their_content(tmp_path: Path) -> None:
    """D2: with line numbers, a removed line gives every later problem the id of another."""
    data = [{"question": f"{i}?", "answer": i, "hint": "none"} for i in range(4)]
    ids = {p.answer: p.id for p in task_of(tmp_path, data, held_out_fraction=0).train}
    assert all(re.fullmatch("train-[0-9a-f]{16}", id_) for id_ in ids.values())
    rest = {p.answer: p.id for p in task_of(tmp_path, data[1:], held_out_fraction=0).train}
    assert rest == {answer: id_ for answer, id_ in ids.items() if answer != "0"}
    other = task_of(tmp_path, [{**data[0], "hint": "count"}], held_out_fraction=0)
    assert other.train[0].id not in ids.values()


def test_repeated_rows_without_ids_are_numbered_and_counted(tmp_path: Path) -> None:
    data = [{"question": "1?", "answer": 1}, {"question": "2?", "answer": 2}]
    task = task_of(tmp_path, [*data, data[0], data[0]], held_out_fraction=0)
    first = task.train[0].id
    assert [p.id for p in task.train] == [first, task.train[1].id, f"{first}-2", f"{first}-3"]
    assert ["2 rows of 4 in" in note for note in task.notes] == [True]
    assert task_of(tmp_path, data, held_out_fraction=0).notes == ()


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([], {}, "train.jsonl: the file is empty"),
        (["\n"], {}, "train.jsonl: the file is empty"),
        ([*rows(1), '{"id": \n'], {}, "train.jsonl, line 2: not JSON"),
        ([*rows(1), "[1]\n"], {}, "line 2: a list; every line must be one JSON object"),
        (['{"question": "\\ud800", "answer": "1"}\n'], {}, "line 1: half of a surrogate"),
        (
            [{"id": "a", "answer": "1"}],
            {},
            "line 1: column 'question' .*does not exist.*are: id, answer",
        ),
        ([{"question": "a?"}], {}, "line 1: column 'answer' .*does not exist"),
        ([{"qestion": "a?"}], {}, "line 1: column 'question' .*did you mean 'qestion'"),
        ([{"messages": "a?", "answer": 1}], {}, "line 1: 'messages': must be a list of messages"),
        ([{"messages": [{"role": "user"}]}], {}, "'messages', message 1: needs role and content"),
        (
            [{"messages": [{"role": "tool", "content": "a"}]}],
            {},
            "role 'tool' is not one of system, user, assistant",
        ),
        ([{"messages": [{"role": "user", "content": []}]}], {}, "content must be text, not"),
        ([{"messages": chat("", "b")[1:]}], {}, "no message of the user before the reply"),
        ([{"question": "a?", "answer": None}], {}, "line 1: column 'answer' .*is null"),
        ([{"question": 7, "answer": "1"}], {}, "line 1: 'question' must be text"),
        ([{"question": " ", "answer": "1"}], {}, "line 1: 'question' must be text"),
        ([{"question": "a?", "answer": " "}], {}, "'answer' must be text or a number, not ' '"),
        ([{"question": "a?", "answer": ["1"]}], {}, "'answer' must be text or a number"),
        ([{"question": "a?", "answer": float("nan")}], {}, "text or a number, not nan"),
        (['{"question": "a?", "answer": 1e999}\n'], {}, "text or a number, not inf"),
        (
            ['{"question": "a?", "answer": 1, "answer": 2}\n'],
            {},
            "line 1: the key 'answer' appears twice",
        ),
        ([f'{{"question": "a?", "answer": {"9" * 5000}}}\n'], {}, "digits; write it as text"),
        ([f'{{"x": {"[" * 9999}{"]" * 9999}}}\n'], {}, "line 1: too many levels"),
        ([rows(1)[0], rows(1)[0]], {}, "line 2: id 'r0' is already used at .*line 1"),
        (rows(2), {"columns": {"id": "key"}}, "'key' .task.columns.id. does not exist"),
        (
            rows(2),
            {"prompt": "{problem}"},
            "no column 'problem'; the columns are: id, question, answer",
        ),
        (rows(2), {"prompt": "Go."}, "names no column"),
        (rows(2), {"prompt": "{question} \\boxed{}"}, "write a literal brace twice"),
        (rows(2), {"prompt": "{question"}, "write a literal brace twice"),
        (rows(2), {"prompt": "{question.__class__}"}, "is not a column"),
    ],
)
def test_broken_data_is_named_by_file_and_line(
    tmp_path: Path, data: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        task_of(tmp_path, data, **settings)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a"}\n' * 99)[:-9])
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}\n')
    (tmp_path / "x.txt").write_text("a,b\n")
    (tmp_path / "latin.csv").write_bytes(b"question,answer\na,1\n\xe9,1\n")
    (tmp_path / "short.csv").write_text('question,answer\n"a\nb",1\n1, 2?,3\n')
    (tmp_path / "open.csv").write_text('question,answer\n"a,1\n')
    (tmp_path / "twice.csv").write_text("question,question\n")
    (tmp_path / "head.csv").write_text("question,answer\n")
    (tmp_path / "semicolon.csv").write_text("question;answer\n1+1;2\n")
    (tmp_path / "bad.parquet").write_text("PAR0")
    for name, message in {
        "none.jsonl": "no such file",
        "cut.jsonl.gz": "not a whole gzip file",
        "latin.jsonl": "line 1: not UTF-8",
        "x.txt": r"not a .jsonl, .csv or .parquet file",
        "latin.csv": "latin.csv, line .: not UTF-8",
        "short.csv": "line 4: 3 cells, but the header has 2 columns",
        "open.csv": "line 2: not CSV: unexpected end of data",
        "twice.csv": "line 1: the header must name every column once",
        "head.csv": "the file is empty",
        "semicolon.csv": "line 1: the header has no comma but ';'; save the file with commas",
        ".": "is a folder",
    }.items():
        with pytest.raises(UserError, match=message):
            made(TaskConfig(kind="jsonl", train=name), tmp_path)
    pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        made(TaskConfig(kind="jsonl", train="bad.parquet"), tmp_path)


def test_the_split_is_by_text_and_the_same_for_every_seed(tmp_path: Path) -> None:
    """200 rows in which each question stands twice under two ids, written a little otherwise."""
    data = [
        {"id": f"{i}{twin}", "question": f"How  much is {i} + 1?{twin}", "answer": "1"}
        for i in range(100)
        for twin in ("", "\n ")
    ]
    task = task_of(tmp_path, data, held_out_fraction=0.3)
    asked = {normalised(p.messages[0].content) for p in task.held_out(None)}
    assert asked.isdisjoint(normalised(p.messages[0].content) for p in task.train)
    assert len(task.train) + len(task.kept_out) == 200
    assert len(task.kept_out) == 2 * len(asked)
    assert 15 <= len(asked) <= 45  # 100 times 0.3 and three standard deviations
    other = task_of(tmp_path, data, seed=5, held_out_fraction=0.3)
    assert other.held_out(None) == task.held_out(None)
    assert other.batch(0, 8) != task.batch(0, 8)
    assert task.facts["repeated_questions"] == 100


def test_training_problems_that_the_held_out_file_asks_are_left_out(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "test.jsonl",
        [{"id": "t0", "question": " 3  + 1? ", "answer": "4"}, {"question": "x?", "answer": "1"}],
    )
    with pytest.raises(UserError, match=r"test.jsonl, line 2: column 'id' .*does not exist"):
        task_of(tmp_path, rows(9), held_out="test.jsonl")
    write_lines(tmp_path / "test.jsonl", [{"id": "t0", "question": "3  + 1?", "answer": "4"}])
    task = task_of(tmp_path, rows(9), held_out="test.jsonl")
    assert "r3" not in {p.id for p in task.train}
    facts = {"read": 9, "repeated_questions": 0, "left_out_same_question_held_out": 1}
    assert task.facts == {**facts, "train": 8, "held_out": 1}
    write_lines(tmp_path / "test.jsonl", [{"id": "r2", "question": "other", "answer": "4"}])
    with pytest.raises(UserError, match="id 'r2' names a training problem and another"):
        task_of(tmp_path, rows(9), held_out="test.jsonl")


def test_known_bad_rows_are_left_out_by_kind(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "issues.jsonl",
        [{"id": "r1", "kind": "wrong"}, {"id": "r2", "kind": "unit"}, {"id": "zz", "kind": "unit"}],
    )
    options: dict[str, Any] = {"held_out_fraction": 0, "exclude": "issues.jsonl"}
    every = task_of(tmp_path, rows(5), **options)
    assert {p.id for p in every.train} == {"r0", "r3", "r4"}
    some = task_of(tmp_path, rows(5), **options, exclude_kinds=["wrong"])
    assert {p.id for p in some.train} == {"r0", "r2", "r3", "r4"}
    assert some.facts["left_out_by_exclude"] == 1
    with pytest.raises(UserError, match=r"'worng' does not occur in .*are: unit, wrong"):
        task_of(tmp_path, rows(5), **options, exclude_kinds=["worng"])


def test_more_problems_than_there_are(tmp_path: Path) -> None:
    task = task_of(tmp_path, rows(5), held_out_fraction=0)
    assert len(task.batch(0, 5)) == 5
    with pytest.raises(UserError, match=r"prompts_per_step = 6 is not between 1 and 5"):
        task.batch(0, 6)
    with pytest.raises(UserError, match="has no held-out problems"):
        task.held_out(None)
    split = task_of(tmp_path, rows(50), held_out_fraction=0.5)
    size = len(split.kept_out)
    sample = split.held_out(size - 1)
    assert sample == [p for p in split.held_out(None) if p in sample]
    assert split.held_out(size + 1) == split.held_out(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "jsnl"}, "choose one of arithmetic, jsonl"),
        ({"kind": "jsonl"}, "task.train is missing"),
        ({"kind": "gym"}, "task.gym is missing"),
        ({"kind": "arithmetic", "train": "x.jsonl"}, "task.train has no meaning"),
        ({"kind": "jsonl", "train": "x", "subset": "main"}, "task.subset has no meaning"),
        ({"kind": "jsonl", "train": "x", "exclude_kinds": ["a"]}, "needs task.exclude"),
        ({"kind": "jsonl", "train": "x", "held_out_fraction": 1.0}, "less than 1"),
        ({"kind": "jsonl", "train": "x", "colums": {}}, "colums"),
        (
            {"kind": "jsonl", "train": "x", "columns": {"answer": "question"}},
            "question and answer are both the column 'question'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskConfig(**settings)


def test_a_written_out_config_can_be_read_again() -> None:
    for config in (TaskConfig(), TaskConfig(kind="jsonl", train="a.jsonl"), GYM):
        assert TaskConfig(**config.model_dump(mode="json", exclude_none=True)) == config


GYM = TaskConfig(kind="gym", gym=[{"name": "lcm", "settings": {"max_value": 9}}])


def test_an_import_path_is_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mytask.py").write_text(
        "class Own:\n"
        "    name = 'own'\n"
        "    def __init__(self, config, seed, base): self.got = (config.kind, seed, base)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task: Any = make_task(TaskConfig(kind="mytask:Own"), 3, tmp_path)
    assert task.got == ("mytask:Own", 3, tmp_path)
    assert make_task(TaskConfig(), 0, tmp_path).name == "arithmetic"
