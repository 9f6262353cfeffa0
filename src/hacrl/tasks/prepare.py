r"""`hacrl data`: a source of math problems into the one form that training and evaluation read.

The form is JSONL, one object a line: `id`, `question`, `answer` (the final answer only, no `$`
around it and no `\boxed{}`, never empty), `source`, and where the source has them `solution`,
`level` (1 to 5) and `subject`.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.files import write_atomic
from hacrl.tasks.dataset import normalised
from hacrl.tasks.rows import Row, hub_rows, read_rows

Report = Callable[[str], None]

MOST_SHOWN = 5
"""Broken rows named in an error."""


@dataclass(frozen=True)
class Mapping:
    """Which columns of the source hold what; None where it has no such column.

    Example: Mapping(question="problem", answer="solution", answer_form="boxed")
    """

    question: str = "question"
    answer: str = "answer"
    answer_form: str = "plain"
    """How the answer column holds the answer: one of ANSWER_FORMS."""
    id: str | None = None
    """Unset: the row's number."""
    solution: str | None = None
    level: str | None = None
    subject: str | None = None
    source: str | None = None
    """Unset: the source's name and the row's number."""


@dataclass
class Prepared:
    """What `prepare` did.

    Example: Prepared(path=Path("gsm8k.jsonl"), rows=1319, skipped=0, notes={"repeated": 0})
    """

    path: Path
    rows: int = 0
    skipped: int = 0
    """Broken rows left out (only with skip_broken)."""
    notes: dict[str, int] = field(default_factory=dict)
    """Things to know: repeated questions, unread levels, questions that are in other files too."""


def prepare(
    source: str,
    target: Path,
    mapping: Mapping | None = None,
    *,
    name: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    cut: str = "",
    against: Sequence[Path] = (),
    skip_broken: bool = False,
    report: Report = print,
) -> Prepared:
    """Write `source` to `target` (.jsonl or .jsonl.gz) in the uniform form.

    `source` is a .jsonl, .jsonl.gz or .parquet file, or with `split` a hub dataset or its folder.
    `name` begins every id (unset: the target's name). `cut` is text to cut off the end of every
    question, such as an instruction somebody added. `against` are files in the uniform form whose
    questions are looked for, to find test problems in training data. Nothing is written when a row
    is broken, unless `skip_broken`.
    """
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"{target}: the target must end in .jsonl or .jsonl.gz")
    mapping = mapping or Mapping()
    if mapping.answer_form not in ANSWER_FORMS:
        raise UserError(
            f"answer_form = {mapping.answer_form!r} is unknown; there are: "
            f"{', '.join(ANSWER_FORMS)}"
        )
    name = name or target.name.removesuffix(".gz").removesuffix(".jsonl")
    rows = hub_rows(source, subset, split) if split else read_rows(Path(source))
    result = Prepared(target, notes={"unread_levels": 0})
    made: list[dict[str, Any]] = []
    broken: list[str] = []
    for row in rows:
        try:
            made.append(_uniform(row, mapping, name, Path(source).name, cut, result.notes))
        except UserError as error:
            broken.append(str(error))
    if broken and not skip_broken:
        shown = "\n  ".join(broken[:MOST_SHOWN])
        raise UserError(
            f"{len(broken)} of {len(rows)} rows are broken, the first:\n  {shown}\n"
            "Mend the mapping, or leave such rows out with skip_broken"
        )
    if not made:
        raise UserError(f"{source}: no row could be used, the first: {broken[0]}")
    _check_ids(made)
    result.rows, result.skipped = len(made), len(broken)
    asked = [normalised(one["question"]) for one in made]
    result.notes["repeated_questions"] = len(asked) - len(set(asked))
    for path in against:
        other = {normalised(str(row.values.get("question", ""))) for row in read_rows(path)}
        result.notes[f"questions_in_{path.name}"] = sum(text in other for text in asked)
    _write(target, made)
    report(f"{target}: {result.rows} rows, {result.skipped} broken rows left out")
    for note, count in result.notes.items():
        if count:
            report(f"  {note}: {count}")
    return result


def _uniform(
    row: Row, mapping: Mapping, name: str, origin: str, cut: str, notes: dict[str, int]
) -> dict[str, Any]:
    question = _text(row, mapping.question).strip()
    question = question.removesuffix(cut).strip() if cut else question
    if not question:
        raise UserError(f"{row.where}: the question is empty")
    try:
        answer = ANSWER_FORMS[mapping.answer_form](_text(row, mapping.answer))
    except ValueError as error:
        raise UserError(f"{row.where}: {error}") from error
    if not answer:
        raise UserError(f"{row.where}: the answer is empty")
    number = _text(row, mapping.id) if mapping.id else str(row.number)
    made: dict[str, Any] = {"id": f"{name}-{number}", "question": question, "answer": answer}
    if mapping.solution:
        made["solution"] = _text(row, mapping.solution)
    if mapping.level:
        level = re.search(r"[1-5]", str(row.values.get(mapping.level)))
        if level:
            made["level"] = int(level[0])
        else:
            notes["unread_levels"] += 1
    if mapping.subject:
        made["subject"] = _text(row, mapping.subject)
    made["source"] = _text(row, mapping.source) if mapping.source else f"{origin} row {row.number}"
    return made


def _text(row: Row, column: str) -> str:
    value = row.values.get(column)
    if value is None or isinstance(value, bool | list | dict):
        raise UserError(
            f"{row.where}: {column!r} should be text or a number, not {value!r}; the columns are: "
            f"{', '.join(row.values)}"
        )
    return str(value)


def _plain(text: str) -> str:
    answer = text.strip()
    while len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    return _boxed(answer) if "\\boxed" in answer else answer


def _after_hashes(text: str) -> str:
    """GSM8K: a solution whose last line is `#### 1,200`."""
    _, mark, answer = text.rpartition("####")
    if not mark:
        raise ValueError(f"no '####' in {text[-60:]!r}")
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())


def _boxed(text: str) -> str:
    r"""MATH: a solution with the answer in its last `\boxed{...}` or `\boxed 7`, braces matched."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        raise ValueError(f"no \\boxed in {text[-60:]!r}")
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0].rstrip(".,")
    depth, escaped = 0, False
    for end, letter in enumerate(rest):
        if not escaped:
            depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:end].strip()
        escaped = letter == "\\" and not escaped
    raise ValueError(f"the braces of the last \\boxed are not closed: {rest[:60]!r}")


ANSWER_FORMS: dict[str, Callable[[str], str]] = {
    "plain": _plain,
    "hashes": _after_hashes,
    "boxed": _boxed,
}
"""plain: the column is the answer; hashes: it stands after `####`; boxed: in the last box."""


def _check_ids(made: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for one in made:
        if one["id"] in seen:
            raise UserError(f"id {one['id']!r} occurs twice; map another column to the id")
        seen.add(one["id"])


def _write(target: Path, made: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in made)
    data = lines.encode()
    if target.suffix == ".gz":
        packed = io.BytesIO()
        # No name and no time inside: the same rows give the same file.
        with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as stream:
            stream.write(data)
        data = packed.getvalue()
    write_atomic(target, data)
