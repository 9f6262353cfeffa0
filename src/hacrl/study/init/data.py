"""Read a data file before a config exists: columns of question and answer, and a verifier that fits."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.tasks.dataset import to_problems
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.rows import Row, read_rows
from hacrl.tasks.settings import ColumnsConfig
from hacrl.types import Problem, Status
from hacrl.verify import VerifierConfig, make_verifier
from hacrl.verify.number import numbers_in

Ask = Callable[[str, str, str | None], str]  # (flag, question, default) -> the user's answer


def nobody(flag: str, question: str, default: str | None) -> str:
    """The `ask` of calls without a user: raises a UserError."""
    raise UserError(f"{flag} is missing")


QUESTION = ("question", "problem", "prompt", "instruction", "query", "input", "text", "q")
ANSWER = (
    *("answer", "final_answer", "ground_truth", "gold", "target", "label", "expected"),
    *("solution", "output", "response", "completion", "a"),
)
MESSAGES = ("messages", "conversation", "conversations")
"""Names of columns, the most telling first."""

_ONE_NUMBER = re.compile(r"[^\w]*[-+\d.,/\s]+[^\w]*(?:[a-zA-Z%°]+\.?)?\s*")
_LATEX = re.compile(r"\\(?:frac|sqrt|boxed|text|pi|left|begin|cdot)|\$|\^")
_LETTER = re.compile(r"\(?[A-Ea-e]\)?\.?")


@dataclass(frozen=True)
class Data:
    """A data file and the columns to use: a question and an answer, or a conversation and an answer
    column or None, if the answer is the last message of the conversation.

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


def read_data(
    path: Path, question: str | None = None, answer: str | None = None, ask: Ask = nobody
) -> Data:
    """Read a data file and choose its columns. Columns that are not given and not clear are asked for;
    UserError without an answer."""
    rows = read_rows(path)
    columns = list(rows[0].values)
    texts = [c for c in columns if isinstance(rows[0].values[c], str)]
    question = question or _choose(QUESTION, texts) or _choose(MESSAGES, columns)
    question = _existing(path, "--question", question, columns, ask)
    rest = [c for c in columns if c != question]
    answer = answer or _choose(ANSWER, rest)
    if not _ends_with_reply(rows[0].values[question]):
        answer = answer or (rest[0] if len(rest) == 1 else None)
        answer = _existing(path, "--answer", answer, columns, ask)
    for row in rows:
        for column in (question, answer):
            if column and row.values.get(column) in (None, ""):
                raise UserError(
                    f"{row.where}: column {column!r} is empty; fill it or delete the row"
                )
    data = Data(path, rows, question, answer)
    data.problems()  # an error if a row cannot be used
    return data


def _ends_with_reply(value: Any) -> bool:
    """Whether the value is a conversation whose last message is the assistant's."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _choose(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column with one of these names; else the only one with such a word in it (`prompt_text`)."""
    lower = {column.lower(): column for column in reversed(columns)}
    words = {name for name in names if len(name) > 1}
    alike = [c for c in columns if words & set(re.split(r"[\W_]+", c.lower()))]
    only = alike[0] if len(alike) == 1 else None
    return next((lower[name] for name in names if name in lower), only)


def _existing(path: Path, flag: str, column: str | None, columns: Sequence[str], ask: Ask) -> str:
    there, what = ", ".join(columns), flag.strip("-")
    if column is None:
        none = f"no column looks like the {what}"
        try:
            column = ask(flag, f"{none}. Which one is it ({there})?", None)
        except UserError:
            raise UserError(f"{path}: {none}; give {flag} COLUMN, one of: {there}") from None
    if column not in columns:
        near = difflib.get_close_matches(column, columns, 1)
        raise UserError(
            f"{flag} {column}: {path} has no such column; its columns are: {there}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return column


def guess_verifier(data: Data) -> tuple[str, str]:
    """The kind of verifier that fits the answers, and the reason in a few words."""
    answers = data.answers
    count = len(answers)
    if all(_LETTER.fullmatch(a) for a in answers):
        return "choice", f"all {count} answers are letters from A to E"
    if all(_ONE_NUMBER.fullmatch(a) and len([*numbers_in(a)]) == 1 for a in answers):
        return "number", f"all {count} answers are numbers"
    if all("####" in a for a in answers):
        return "number", f"all {count} answers end with #### and a number, as in GSM8K"
    if sum(bool(_LATEX.search(a)) for a in answers) * 5 > count and find_spec("math_verify"):
        return "math", "many answers are formulas"
    return "exact", "the answers are short texts; the whole reply is compared"


def check_references(data: Data, kind: str, options: dict[str, Any], most: int = 200) -> str:
    """Judge the reference answers. Returns a warning if the verifier rejects some, else ""."""
    verifier = make_verifier(VerifierConfig(kind=kind, options=options))
    rows = list(zip(data.answers, data.rows, strict=True))[:most]
    bad = [
        row.where
        for answer, row in rows
        if verifier.judge(answer, Problem("p", (), answer, "t")).status is not Status.OK
    ]
    if not bad:
        return ""
    return (
        f"the verifier {kind} rejects {len(bad)} of the first {len(rows)} answers of the file as "
        f"replies (first: {bad[0]}); choose another one with --reward"
    )
