"""Read a data file before a config exists: columns of question and answer, and a verifier that fits."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from hacrl.errors import UserError
from hacrl.tasks.dataset import to_problems
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import Row, read_rows
from hacrl.tasks.settings import ColumnsConfig
from hacrl.types import Problem
from hacrl.verify.number import numbers_in

Ask = Callable[[str, str, str | None], str]  # (flag, question, default) -> the user's answer

QUESTION = ("question", "problem", "prompt", "instruction", "query", "input", "messages")
ANSWER = ("answer", "final_answer", "ground_truth", "target", "label", "solution", "output")
"""Names of columns, the most telling first."""

_ONE_NUMBER = re.compile(r"[^\w]*[-+\d.,/\s]+[^\w]*(?:[a-zA-Z%°]+\.?)?\s*")
_LATEX = re.compile(r"\\(?:frac|sqrt|boxed|text|pi|left|begin|cdot)|\$|\^")
_LETTER = re.compile(r"\(?[A-Ea-e]\)?\.?")


@dataclass(frozen=True)
class Data:
    """A data file and the columns to use: a question or a conversation, and an answer or None, if the
    answer is the last message of the conversation.

    Example: Data(Path("quiz.jsonl"), rows, question="problem", answer="answer")
    """

    path: Path
    rows: Sequence[Row]
    question: str
    answer: str | None

    @property
    def columns(self) -> dict[str, str]:
        """The table task.columns."""
        asked = "messages" if isinstance(self.rows[0].values[self.question], list) else "question"
        return {asked: self.question} | ({"answer": self.answer} if self.answer else {})

    @property
    def answer_source(self) -> str:
        return f"column {self.answer!r}" if self.answer else "the last message"

    def problems(self, prompt: str = "{question}", most: int | None = None) -> list[Problem]:
        """The problems of the first rows, as a run reads them."""
        template = PromptTemplate(prompt, "task.prompt")
        columns = ColumnsConfig.model_validate(self.columns)
        return to_problems(list(self.rows[:most]), columns, template, "data", "data")

    @cached_property
    def answers(self) -> list[str]:
        return [problem.answer.strip() for problem in self.problems()]

    @property
    def other_columns(self) -> list[str]:
        return [name for name in self.rows[0].values if name not in (self.question, self.answer)]


def read_data(path: Path, question: str | None, answer: str | None, ask: Ask) -> Data:
    """Read a data file and choose its columns. Columns that are not given and not clear are asked for;
    UserError if a row cannot be used."""
    rows = read_rows(path)
    first = rows[0].values
    columns = list(first)
    question = _column(path, "--question", question, QUESTION, columns, ask)
    last = first[question][-1:] if isinstance(first[question], list) else []
    if answer or not any(isinstance(m, dict) and m.get("role") == "assistant" for m in last):
        answer = _column(path, "--answer", answer, ANSWER, columns, ask)
    data = Data(path, rows, question, answer)
    data.problems()
    return data


def _column(
    path: Path, flag: str, given: str | None, names: Sequence[str], columns: Sequence[str], ask: Ask
) -> str:
    """The given column, else one with a known name, else the one that the user names."""
    lower = {column.lower(): column for column in columns}
    there, what = ", ".join(columns), flag.strip("-")
    column = given or next((lower[name] for name in names if name in lower), None)
    if column is None:
        try:
            column = ask(flag, f"Which column is the {what} ({there})?", None)
        except UserError:
            raise UserError(f"{path}: give {flag} COLUMN, one of: {there}") from None
    if column not in columns:
        raise UserError(f"{flag} {column}: {path} has no such column; its columns are: {there}")
    return column


def guess_verifier(answers: Sequence[str]) -> tuple[str, str]:
    """The kind of verifier that fits the answers, and the reason in a few words."""
    if all(_LETTER.fullmatch(a) for a in answers):
        return "choice", f"all {len(answers)} answers are letters from A to E"
    if all(_ONE_NUMBER.fullmatch(a) and len([*numbers_in(a)]) == 1 for a in answers):
        return "number", f"all {len(answers)} answers are numbers"
    if all("####" in a for a in answers):
        return "number", f"all {len(answers)} answers end with #### and a number, as in GSM8K"
    if sum(bool(_LATEX.search(a)) for a in answers) * 5 > len(answers) and find_spec("math_verify"):
        return "math", "many answers are formulas"
    return "exact", "the answers are short texts; the whole reply is compared"
