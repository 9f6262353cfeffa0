"""Problems from files or hub datasets: a column mapping, a prompt template, a clean split.

Training and held-out problems never overlap, and that is decided by what they ask, not by their
ids: the same text in other white space or other letter case counts as the same problem.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.tasks.deck import Deck, hash_number, hash_share
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import Row, hub_rows, read_rows
from hacrl.tasks.settings import ColumnsConfig, TaskConfig
from hacrl.types import Message, Problem


def normalised(text: str) -> str:
    """What two writings of the same question share: no white space, no letter case."""
    return "".join(unicodedata.normalize("NFC", text).casefold().split())


class DatasetTask:
    """A fixed list of training problems and a fixed list of held-out ones.

    Example: DatasetTask("math", train, held_out, seed=0, facts={}).batch(step=3, count=128)
    """

    def __init__(
        self,
        name: str,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        seed: int,
        facts: dict[str, int],
    ) -> None:
        self.name = name
        self.train = tuple(train)
        self.kept_out = tuple(held_out)
        self.facts = {**facts, "train": len(self.train), "held_out": len(self.kept_out)}
        """Counts of what was read, left out and kept."""
        self._deck = Deck([problem.id for problem in self.train], seed)

    def batch(self, step: int, count: int) -> list[Problem]:
        """The step's training problems, none twice; all come once before any comes again."""
        if not 1 <= count <= len(self.train):
            raise UserError(
                f"prompts_per_step = {count} is not between 1 and {len(self.train)}, the training "
                f"problems of task {self.name!r}"
            )
        return [self.train[i] for i in self._deck.deal(step, count)]

    def held_out(self, count: int | None) -> list[Problem]:
        """All held-out problems in order, or a fixed sample of them."""
        if not self.kept_out:
            raise UserError(
                f"task {self.name!r} has no held-out problems: give task.held_out, or a "
                "task.held_out_share above 0"
            )
        if count is None:
            return list(self.kept_out)
        if not 1 <= count <= len(self.kept_out):
            raise UserError(
                f"{count} held-out problems are asked for, but task {self.name!r} has "
                f"{len(self.kept_out)}; ask for at most as many, or for all"
            )
        by_hash = sorted(
            range(len(self.kept_out)), key=lambda i: hash_number("sample", self.kept_out[i].id)
        )
        return [self.kept_out[i] for i in sorted(by_hash[:count])]


def file_task(config: TaskConfig, seed: int, base: Path) -> DatasetTask:
    """The task of `kind = "jsonl"`."""
    assert config.train is not None
    path = base / config.train
    held_out = read_rows(base / config.held_out) if config.held_out else None
    return build(config, seed, base, read_rows(path), held_out, _stem(path.name))


def hub_task(config: TaskConfig, seed: int, base: Path) -> DatasetTask:
    """The task of `kind = "hub"`; the held-out problems may come from a file."""
    assert config.train is not None
    folder = base / config.train
    source = str(folder) if folder.exists() else config.train
    held_out = None
    if config.held_out:
        held_out = read_rows(base / config.held_out)
    elif config.held_out_split:
        held_out = hub_rows(source, config.subset, config.held_out_split)
    rows = hub_rows(source, config.subset, config.train_split)
    return build(config, seed, base, rows, held_out, _stem(Path(config.train).name))


def build(
    config: TaskConfig,
    seed: int,
    base: Path,
    train: list[Row],
    held_out: list[Row] | None,
    stem: str,
) -> DatasetTask:
    """Rows to problems, the split, and the counts of what was left out."""
    name = config.name or stem
    template = PromptTemplate(config.prompt, "task.prompt")
    problems = to_problems(train, config.columns, template, name, stem)
    asked = [normalised(_question(row, config.columns)) for row in train]
    facts = {"read": len(problems), "repeated_questions": len(asked) - len(set(asked))}

    if held_out is not None:
        prefix = _stem(Path(config.held_out or config.held_out_split or "held_out").name)
        kept_out = to_problems(held_out, config.columns, template, name, f"{prefix}-held-out")
        forbidden = {normalised(_question(row, config.columns)) for row in held_out}
    else:
        aside = [hash_share("split", text) < config.held_out_share for text in asked]
        kept_out = [p for p, out in zip(problems, aside, strict=True) if out]
        forbidden = {text for text, out in zip(asked, aside, strict=True) if out}
    left = [p for p, text in zip(problems, asked, strict=True) if text not in forbidden]
    if held_out is not None:
        facts["left_out_same_question_held_out"] = len(problems) - len(left)
        same = {p.id for p in left} & {p.id for p in kept_out}
        if same:
            raise UserError(
                f"id {min(same)!r} names a training problem and another held-out problem; ids must "
                "tell them apart"
            )
    if config.exclude:
        excluded = _excluded_ids(base / config.exclude, config.exclude_kinds)
        before = len(left)
        left = [p for p in left if p.id not in excluded]
        facts["left_out_by_exclude"] = before - len(left)
    if not left:
        raise UserError(f"task {name!r} has no training problems left: {facts}")
    return DatasetTask(name, left, kept_out, seed, facts)


def to_problems(
    rows: list[Row], columns: ColumnsConfig, template: PromptTemplate, name: str, stem: str
) -> list[Problem]:
    """Checks every row and makes problems of them; `stem` begins the ids of rows without one."""
    id_column = columns.id or ("id" if "id" in rows[0].values else None)
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for row in rows:
        question, answer = _question(row, columns), _answer(row, columns)
        id_ = str(_column(row, id_column, "id")) if id_column else f"{stem}-{row.number}"
        if id_ in seen:
            raise UserError(f"{row.where}: id {id_!r} is already that of {seen[id_]}")
        seen[id_] = row.where
        values = {**row.values, "question": question, "answer": answer, "id": id_}
        if row is rows[0]:
            template.check(values)
        prompt = template.render(values, row.where)
        own = {columns.question, columns.answer, id_column}
        problems.append(
            Problem(
                id=id_,
                messages=(Message("user", prompt),),
                answer=answer,
                task=str(_column(row, columns.task, "task")) if columns.task else name,
                columns={key: value for key, value in row.values.items() if key not in own},
            )
        )
    return problems


def _column(row: Row, column: str, meaning: str) -> Any:
    value = row.values.get(column)
    if value is None:
        raise UserError(
            f"{row.where}: there is no {column!r}, which task.columns.{meaning} names; the columns "
            f"are: {', '.join(row.values)}"
        )
    return value


def _question(row: Row, columns: ColumnsConfig) -> str:
    question = _column(row, columns.question, "question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(
            f"{row.where}: {columns.question!r} should be a text that is not empty, not {question!r}"
        )
    return question


def _answer(row: Row, columns: ColumnsConfig) -> str:
    answer = _column(row, columns.answer, "answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(f"{row.where}: {columns.answer!r} should be text or a number: {answer!r}")
    if not str(answer).strip():
        raise UserError(f"{row.where}: {columns.answer!r} is empty, so no reply could be right")
    return str(answer)


def _excluded_ids(path: Path, kinds: tuple[str, ...] | None) -> set[str]:
    rows = read_rows(path)
    found = {row.values.get("kind") for row in rows}
    for kind in kinds or ():
        if kind not in found:
            there = ", ".join(sorted(str(k) for k in found))
            raise UserError(
                f"task.exclude_kinds: {kind!r} does not occur in {path}; there: {there}"
            )
    ids = set()
    for row in rows:
        if "id" not in row.values:
            raise UserError(f"{row.where}: every line of task.exclude needs an 'id'")
        if kinds is None or row.values.get("kind") in kinds:
            ids.add(str(row.values["id"]))
    return ids


def _stem(file_name: str) -> str:
    return file_name.split(".")[0] or file_name
