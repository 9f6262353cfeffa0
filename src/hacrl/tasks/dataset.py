"""Problems from files or hub datasets: a column mapping, a prompt template, a clean split.

Training and held-out problems never overlap. Problems are compared by their text, not by their ids:
the same text with other white space or letter case is the same problem.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hacrl.errors import UserError
from hacrl.safe_text import plural
from hacrl.tasks.deck import Deck, check_count, hash_fraction, hash_number
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import Row, hub_rows, read_rows
from hacrl.tasks.settings import ColumnsConfig, TaskConfig
from hacrl.types import Message, Problem


def normalised(text: str) -> str:
    """The text without white space and letter case, to compare questions."""
    return "".join(unicodedata.normalize("NFC", text).casefold().split())


class DatasetTask:
    """A fixed list of training problems and a fixed list of held-out problems.

    Example: DatasetTask("math", train, held_out, seed=0).batch(step=3, count=128)
    """

    def __init__(
        self,
        name: str,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        seed: int,
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.train = tuple(train)
        self.kept_out = tuple(held_out)
        self.notes = tuple(notes)  # sentences about the data for the user; a run shows them
        self._deck = Deck([problem.id for problem in self.train], seed)

    def batch(self, step: int, count: int) -> list[Problem]:
        """The step's training problems, all different; every problem comes once per epoch."""
        check_count(count, len(self.train), f"training problems of task {self.name!r}")
        return [self.train[i] for i in self._deck.deal(step, count)]

    def held_out(self, count: int | None) -> list[Problem]:
        """All held-out problems in order, or a fixed sample of them."""
        size = len(self.kept_out)
        if not size:
            raise UserError(
                f"task {self.name!r} has no held-out problems: set task.held_out, raise "
                "task.held_out_fraction, or switch evaluation off with evaluation.problems=0"
            )
        by_hash = sorted(range(size), key=lambda i: hash_number("sample", self.kept_out[i].id))
        return [self.kept_out[i] for i in sorted(by_hash[:count])]


def dataset_task(config: TaskConfig, seed: int, base: Path) -> DatasetTask:
    """The task of `kind = "jsonl"`, "parquet" and "hub"; held-out problems of a hub dataset may come
    from a file."""
    assert config.train is not None
    path, columns = base / config.train, config.columns
    source = str(path) if path.exists() else config.train
    hub = config.kind == "hub"
    train = hub_rows(source, config.subset, config.train_split) if hub else read_rows(path)
    stem = _stem(config.train)
    name = config.name or stem
    template = PromptTemplate(config.prompt, "task.prompt")
    problems = to_problems(train, columns, template, name, stem)
    asked = [_asked(row, columns) for row in train]
    same = 0
    if place := config.held_out or config.held_out_split:
        held_out = (
            read_rows(base / place) if config.held_out else hub_rows(source, config.subset, place)
        )
        kept_out = to_problems(held_out, columns, template, name, f"{_stem(place)}-held-out")
        forbidden = {_asked(row, columns) for row in held_out}
        same = sum(text in forbidden for text in asked)
    else:
        forbidden = {t for t in asked if hash_fraction("split", t) < config.held_out_fraction}
        kept_out = [p for p, text in zip(problems, asked, strict=True) if text in forbidden]
    left = [p for p, text in zip(problems, asked, strict=True) if text not in forbidden]
    if twice := {p.id for p in left} & {p.id for p in kept_out}:
        raise UserError(
            f"id {min(twice)!r} names a training problem and another held-out problem; every "
            "problem needs its own id"
        )
    notes, lost = [], [f"{same} ask the same as a held-out problem"] if same else []
    if config.exclude:
        excluded = _excluded_ids(base / config.exclude, config.exclude_kinds)
        lost.append(f"{sum(p.id in excluded for p in left)} are listed in task.exclude")
        left = [p for p in left if p.id not in excluded]
    if not left:
        raise UserError(
            f"task {name!r} has no training problems left of {plural(len(train), 'row')}; "
            f"{plural(len(kept_out), 'problem')} held out"
        )
    if repeated := len(train) - len({_content(row) for row in train}):
        notes.append(
            f"{plural(repeated, 'row')} of {len(train)} in {config.train}: the same as another row; "
            "each is a problem of its own"
        )
    if lost:
        notes.append(
            f"of the {len(train)} rows of {config.train} these are left out: {', '.join(lost)}"
        )
    return DatasetTask(name, left, kept_out, seed, notes)


def to_problems(
    rows: list[Row], columns: ColumnsConfig, template: PromptTemplate, name: str, stem: str
) -> list[Problem]:
    """Check every row and convert it to a problem. A row without an id gets `stem` and a hash of its
    content, and a number if the row comes again."""
    id_column = columns.id or ("id" if "id" in rows[0].values else None)
    copies: Counter[str] = Counter()
    own = {columns.question, columns.answer, id_column, _messages_column(rows[0], columns)}
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for row in rows:
        messages, answer = _messages(row, columns), _answer(row, columns)
        if id_column:
            id_ = str(_column(row, id_column, "id"))
        else:
            id_ = f"{stem}-{_content(row)}"
            copies[id_] += 1
            id_ += f"-{copies[id_]}" if copies[id_] > 1 else ""
        if id_ in seen:
            raise UserError(f"{row.where}: id {id_!r} is already used at {seen[id_]}")
        seen[id_] = row.where
        values = {**row.values, "question": messages[-1].content, "answer": answer, "id": id_}
        problem = Problem(
            id=id_,
            messages=(*messages[:-1], Message("user", template.render(values, row.where))),
            answer=answer,
            task=str(_column(row, columns.task, "task")) if columns.task else name,
            columns={key: value for key, value in row.values.items() if key not in own},
            asked={key: value for key, value in row.values.items() if key in own},
        )
        problems.append(problem)
    return problems


def _content(row: Row) -> str:
    """A hash of all columns of the row."""
    return f"{hash_number(json.dumps(row.values, sort_keys=True, default=str)):016x}"


def _column(row: Row, column: str, meaning: str) -> Any:
    value = row.values.get(column)
    if value is None:
        problem = "is null" if column in row.values else "does not exist"
        raise UserError(
            f"{row.where}: column {column!r} (task.columns.{meaning}) {problem}; the columns are: "
            f"{', '.join(row.values)}"
        )
    return value


def _messages_column(row: Row, columns: ColumnsConfig) -> str | None:
    """The column with a conversation, if the row has one instead of a question."""
    found = columns.question not in row.values and "messages" in row.values
    return columns.messages or ("messages" if found else None)


def _messages(row: Row, columns: ColumnsConfig) -> tuple[Message, ...]:
    """What is asked: the question, or the conversation up to the reply."""
    if column := _messages_column(row, columns):
        return _conversation(row, column)[0]
    question = _column(row, columns.question, "question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{row.where}: {columns.question!r} must be text, not {question!r}")
    return (Message("user", question),)


def _asked(row: Row, columns: ColumnsConfig) -> str:
    """The whole text that is asked, to compare problems."""
    return normalised("\n".join(message.content for message in _messages(row, columns)))


def _answer(row: Row, columns: ColumnsConfig) -> str:
    column = _messages_column(row, columns)
    if column and columns.answer not in row.values and (reply := _conversation(row, column)[1]):
        return reply
    answer = _column(row, columns.answer, "answer")
    valid = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    if not valid or not str(answer).strip() or (isinstance(answer, float) and not isfinite(answer)):
        raise UserError(f"{row.where}: {columns.answer!r} must be text or a number, not {answer!r}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # spreadsheets write 42 as 42.0
    return str(answer)


class _Turn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str = Field(pattern=r"\S")


_CONVERSATION = TypeAdapter(Annotated[list[_Turn], Field(min_length=1)])


def _conversation(row: Row, column: str) -> tuple[tuple[Message, ...], str | None]:
    """The conversation up to the reply, and the reply if the row ends with one."""
    where = f"{row.where}: {column!r}"
    try:
        turns = _CONVERSATION.validate_python(_column(row, column, "messages"))
    except ValidationError as error:
        fault = error.errors()[0]
        problem = " ".join([".".join(map(str, fault["loc"])), fault["msg"]]).strip()
        raise UserError(
            f"{where} must be a list of messages {{role, content}}: {problem}, not "
            f"{fault['input']!r:.80}"
        ) from error
    messages = tuple(Message(turn.role, turn.content) for turn in turns)
    reply = None
    if messages[-1].role == "assistant":
        reply, messages = messages[-1].content, messages[:-1]
    if not messages or messages[-1].role != "user":
        raise UserError(f"{where}: no message of the user before the reply; the last one asks")
    if any(message.role == "system" for message in messages[1:]):
        raise UserError(f"{where}: a system message must be the first one")
    return messages, reply


def _excluded_ids(path: Path, kinds: tuple[str, ...] | None) -> set[str]:
    rows = [row.values for row in read_rows(path)]
    return {str(row.get("id")) for row in rows if kinds is None or row.get("kind") in kinds}


def _stem(path: str) -> str:
    name = Path(path).name
    return name.split(".")[0] or name
