"""Problems from files or hub datasets: a column mapping, a prompt template, a clean split.

Training and held-out problems never overlap. Problems are compared by their text, not by their ids:
the same text with other white space or letter case is the same problem.
"""

import difflib
import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.safe_text import plural
from hacrl.tasks.deck import Deck, check_count, hash_fraction, hash_number
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import Row, hub_rows, read_rows
from hacrl.tasks.settings import ColumnsConfig, TaskConfig
from hacrl.types import Message, Problem

ROLES = ("system", "user", "assistant")


def normalised(text: str) -> str:
    """The text without white space and letter case, to compare questions."""
    return "".join(unicodedata.normalize("NFC", text).casefold().split())


class DatasetTask:
    """A fixed list of training problems and a fixed list of held-out problems.

    Example: DatasetTask("math", train, held_out, seed=0, facts={}).batch(step=3, count=128)
    """

    def __init__(
        self,
        name: str,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        seed: int,
        facts: dict[str, int],
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.train = tuple(train)
        self.kept_out = tuple(held_out)
        self.facts = {**facts, "train": len(self.train), "held_out": len(self.kept_out)}
        """Counts of the problems read, left out and kept."""
        self.notes = tuple(notes)  # sentences about the data for the user; a run shows them
        self._deck = Deck([problem.id for problem in self.train], seed)

    def batch(self, step: int, count: int) -> list[Problem]:
        """The step's training problems, all different; every problem comes once per epoch."""
        of = f"training problems of task {self.name!r}"
        check_count(count, len(self.train), of)
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
    path = base / config.train
    source = str(path) if path.exists() else config.train
    held_out = None
    if config.held_out:
        held_out = read_rows(base / config.held_out)
    elif config.held_out_split:
        held_out = hub_rows(source, config.subset, config.held_out_split)
    hub = config.kind == "hub"
    train = hub_rows(source, config.subset, config.train_split) if hub else read_rows(path)
    return _build(config, seed, base, train, held_out)


def _build(
    config: TaskConfig, seed: int, base: Path, train: list[Row], held_out: list[Row] | None
) -> DatasetTask:
    """Convert rows to problems, split them, and count what is left out."""
    stem = _stem(config.train or "")
    name = config.name or stem
    template = PromptTemplate(config.prompt, "task.prompt")
    problems = to_problems(train, config.columns, template, name, stem)
    asked = [_asked(row, config.columns) for row in train]
    facts = {"read": len(problems), "repeated_questions": len(asked) - len(set(asked))}

    if held_out is not None:
        prefix = f"{_stem(config.held_out or config.held_out_split or 'held_out')}-held-out"
        kept_out = to_problems(held_out, config.columns, template, name, prefix)
        forbidden = {_asked(row, config.columns) for row in held_out}
    else:
        forbidden = {t for t in asked if hash_fraction("split", t) < config.held_out_fraction}
        kept_out = [p for p, text in zip(problems, asked, strict=True) if text in forbidden]
    left = [p for p, text in zip(problems, asked, strict=True) if text not in forbidden]
    if held_out is not None:
        facts["left_out_same_question_held_out"] = len(problems) - len(left)
        if same := {p.id for p in left} & {p.id for p in kept_out}:
            raise UserError(
                f"id {min(same)!r} names a training problem and another held-out problem; every "
                "problem needs its own id"
            )
    if config.exclude:
        excluded = _excluded_ids(base / config.exclude, config.exclude_kinds)
        facts["left_out_by_exclude"] = sum(p.id in excluded for p in left)
        left = [p for p in left if p.id not in excluded]
    if not left:
        raise UserError(f"task {name!r} has no training problems left: {facts}")
    notes = _notes(config, train, problems, asked, template)
    reasons = {
        "left_out_same_question_held_out": "ask the same as a held-out problem",
        "left_out_by_exclude": "are listed in task.exclude",
    }
    if lost := [f"{facts[key]} {text}" for key, text in reasons.items() if facts.get(key)]:
        notes.append(
            f"of the {len(train)} rows of {config.train} these are left out: " + ", ".join(lost)
        )
    if held_out is not None and (repeated := len(kept_out) - len({p.messages for p in kept_out})):
        place = config.held_out or "the held-out split"
        notes.append(
            f"{plural(repeated, 'row')} of {len(kept_out)} in {place}: the same prompt as another row; "
            "each counts as a problem, so intervals are too narrow"
        )
    if config.exclude and not facts["left_out_by_exclude"]:
        notes.append(
            f"task.exclude leaves nothing out: no training problem has an id of {config.exclude}; an id "
            f"is written like {left[0].id!r}"
        )
    return DatasetTask(name, left, kept_out, seed, facts, notes)


def _notes(
    config: TaskConfig,
    rows: list[Row],
    problems: list[Problem],
    asked: list[str],
    template: PromptTemplate,
) -> list[str]:
    """What a person should know about the rows of the training file."""
    notes, file = [], config.train
    if repeated := len(rows) - len({_content(row) for row in rows}):
        notes.append(
            f"{plural(repeated, 'row')} of {len(rows)} in {file}: the same as another row; each is a "
            "problem of its own"
        )
    if shown := {"answer", config.columns.answer} & {*template.names}:
        notes.append(
            f"task.prompt = {template.text!r} shows {{{min(shown)}}}, the reference answer, to the model"
        )
    prompts: dict[str, dict[str, set[str]]] = {}
    for text, problem in zip(asked, problems, strict=True):
        same = prompts.setdefault(text, {})
        same.setdefault(problem.messages[-1].content, set()).add(problem.answer.strip())
    answers = {q: found for same in prompts.values() for q, found in same.items() if len(found) > 1}
    if answers:
        question, found = min(answers.items())
        notes.append(
            f"{plural(len(answers), 'prompt')} of {file} with more than one answer: each row accepts "
            f"only its own. The first: {question[:80]!r} has {' and '.join(sorted(found)[:2])}"
        )
    several = sum(len(same) for same in prompts.values() if len(same) > 1)
    if several and {*template.names} - {"question", config.columns.question}:
        text = (
            f"{several} prompts of {file} ask the same question as another prompt and count as one "
            "problem when problems are held out. Name the column that differs in task.columns.question"
        )
        if len(prompts) == 1:
            raise UserError(text)
        notes.append(text)
    return notes


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
        question = messages[-1].content
        values = {**row.values, "question": question, "answer": answer, "id": id_}
        if row is rows[0]:
            template.check(values)
        task = str(_column(row, columns.task, "task")) if columns.task else name
        problem = Problem(
            id=id_,
            messages=(*messages[:-1], Message("user", template.render(values, row.where))),
            answer=answer,
            task=task if task.strip() else name,  # "" means all tasks in capability
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
        near = difflib.get_close_matches(column, set(row.values) - {column}, 1)
        raise UserError(
            f"{row.where}: column {column!r} (task.columns.{meaning}) {problem}; the columns are: "
            f"{', '.join(row.values)}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return value


def _messages_column(row: Row, columns: ColumnsConfig) -> str | None:
    """The column with a conversation, if the row has one instead of a question."""
    found = columns.question not in row.values and "messages" in row.values
    return columns.messages or ("messages" if found else None)


def _conversation(row: Row, column: str) -> tuple[tuple[Message, ...], str | None]:
    return read_messages(_column(row, column, "messages"), f"{row.where}: {column!r}")


def _messages(row: Row, columns: ColumnsConfig) -> tuple[Message, ...]:
    """What is asked: the question, or the conversation up to the reply."""
    if column := _messages_column(row, columns):
        return _conversation(row, column)[0]
    return (Message("user", _question(row, columns)),)


def _asked(row: Row, columns: ColumnsConfig) -> str:
    """The whole text that is asked, to compare problems."""
    return normalised("\n".join(message.content for message in _messages(row, columns)))


def _question(row: Row, columns: ColumnsConfig) -> str:
    question = _column(row, columns.question, "question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{row.where}: {columns.question!r} must be text, not {question!r}")
    return question


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


def read_messages(value: Any, where: str) -> tuple[tuple[Message, ...], str | None]:
    """Return the conversation up to the reply, and the reply if the row ends with one.

    The conversation ends with a message of the user; a system message stands first. `where` names
    row and column in a UserError.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: must be a list of messages {{role, content}}, not {_short(value)}"
        )
    messages = tuple(_message(part, f"{where}, message {i}") for i, part in enumerate(value, 1))
    reply = None
    if messages[-1].role == "assistant":
        reply, messages = messages[-1].content, messages[:-1]
    if not messages or messages[-1].role != "user":
        raise UserError(f"{where}: no message of the user before the reply; the last one asks")
    if any(message.role == "system" for message in messages[1:]):
        raise UserError(f"{where}: a system message must be the first one")
    return messages, reply


def _message(part: Any, where: str) -> Message:
    if not isinstance(part, dict) or not {"role", "content"} <= part.keys():
        raise UserError(f"{where}: needs role and content, not {_short(part)}")
    role, content = part["role"], part["content"]
    if role not in ROLES:
        raise UserError(f"{where}: role {role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise UserError(f"{where}: content must be text, not {_short(content)}")
    return Message(role, content)


def _short(value: Any) -> str:
    return f"{value!r:.80}"


def _excluded_ids(path: Path, kinds: tuple[str, ...] | None) -> set[str]:
    rows = read_rows(path)
    found = {row.values.get("kind") for row in rows}
    if unknown := [kind for kind in kinds or () if kind not in found]:
        raise UserError(
            f"task.exclude_kinds: {unknown[0]!r} does not occur in {path}; the kinds there are: "
            f"{', '.join(sorted(map(str, found)))}"
        )
    for row in rows:
        if "id" not in row.values:
            raise UserError(f"{row.where}: every line of task.exclude needs an 'id'")
    return {str(r.values["id"]) for r in rows if kinds is None or r.values.get("kind") in kinds}


def _stem(path: str) -> str:
    name = Path(path).name
    return name.split(".")[0] or name
