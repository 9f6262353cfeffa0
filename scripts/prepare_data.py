r"""Convert a source of math problems to the JSONL form that training and evaluation read.

    python scripts/prepare_data.py train.jsonl gsm8k.jsonl.gz --answer-form hashes --solution answer

SOURCE is a .jsonl, .jsonl.gz or .parquet file, or with --split a hub dataset or its folder. TARGET has
one JSON object per line: `id`, `question`, `answer` (the final answer only, without `$` and `\boxed{}`,
never empty), `source`, and if the source has them `solution`, `level` (1 to 5) and `subject`. Nothing is
written if a row is broken, unless --skip-broken is given.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.files import write_atomic
from hacrl.tasks.dataset import normalised
from hacrl.tasks.rows import Row, hub_rows, read_rows


def plain(text: str) -> str:
    answer = text.strip()
    while len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    return boxed(answer) if "\\boxed" in answer else answer


def after_hashes(text: str) -> str:
    """GSM8K: a solution whose last line is `#### 1,200`."""
    _, mark, answer = text.rpartition("####")
    if not mark:
        raise ValueError(f"no '####' in {text[-60:]!r}")
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())


def boxed(text: str) -> str:
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
    "plain": plain,
    "hashes": after_hashes,
    "boxed": boxed,
}
"""plain: the column is the answer; hashes: the answer follows `####`; boxed: it is in the last box."""


def text_of(row: Row, column: str) -> str:
    value = row.values.get(column)
    if value is None or isinstance(value, bool | list | dict):
        raise UserError(
            f"{row.where}: {column!r} must be text or a number, not {value!r}; the columns are: "
            f"{', '.join(row.values)}"
        )
    return str(value)


def convert(row: Row, args: argparse.Namespace, notes: dict[str, int]) -> dict[str, Any]:
    """One row in the form of TARGET; UserError for a broken row."""
    question = text_of(row, args.question).strip().removesuffix(args.remove_suffix or "\0").strip()
    try:
        answer = ANSWER_FORMS[args.answer_form](text_of(row, args.answer))
    except ValueError as error:
        raise UserError(
            error if isinstance(error, UserError) else f"{row.where}: {error}"
        ) from error
    if not question or not answer:
        raise UserError(f"{row.where}: the {'answer' if question else 'question'} is empty")
    name = args.target.name.removesuffix(".gz").removesuffix(".jsonl")
    number = text_of(row, args.id) if args.id else str(row.number)
    result: dict[str, Any] = {"id": f"{name}-{number}", "question": question, "answer": answer}
    if args.solution:
        result["solution"] = text_of(row, args.solution)
    if args.level:
        if level := re.search(r"[1-5]", str(row.values.get(args.level))):
            result["level"] = int(level[0])
        else:
            notes["unread_levels"] += 1
    if args.subject:
        result["subject"] = text_of(row, args.subject)
    return {**result, "source": f"{Path(args.source).name} row {row.number}"}


def prepare(args: argparse.Namespace) -> dict[str, int]:
    """Write the target and return the counts that are printed."""
    if not args.target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"{args.target}: the target must end in .jsonl or .jsonl.gz")
    rows = (
        hub_rows(args.source, args.subset, args.split)
        if args.split
        else read_rows(Path(args.source))
    )
    notes = {"unread_levels": 0}
    results: dict[str, dict[str, Any]] = {}
    broken: list[str] = []
    for row in rows:
        try:
            result = convert(row, args, notes)
        except UserError as error:
            broken.append(str(error))
            continue
        if result["id"] in results:
            raise UserError(f"id {result['id']!r} occurs twice; choose another column with --id")
        results[result["id"]] = result
    if broken and (not args.skip_broken or not results):
        shown = "\n  ".join(broken[:5])
        raise UserError(
            f"{len(broken)} of {len(rows)} rows are broken, the first:\n  {shown}\n"
            "Fix the columns, or leave such rows out with --skip-broken"
        )
    asked = [normalised(result["question"]) for result in results.values()]
    notes["repeated_questions"] = len(asked) - len(set(asked))
    for path in args.against:
        other = {normalised(str(row.values.get("question", ""))) for row in read_rows(path)}
        notes[f"questions_in_{path.name}"] = sum(text in other for text in asked)
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in results.values()).encode()
    # mtime=0: the same rows give the same file.
    write_atomic(
        args.target, gzip.compress(lines, mtime=0) if args.target.suffix == ".gz" else lines
    )
    return {"rows": len(results), "broken_rows_left_out": len(broken), **notes}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="JSONL or Parquet file; hub dataset with --split")
    parser.add_argument(
        "target", type=Path, help="NAME.jsonl or NAME.jsonl.gz; NAME begins the ids"
    )
    parser.add_argument("--question", default="question", help="column with the question")
    parser.add_argument("--answer", default="answer", help="column with the answer")
    parser.add_argument("--answer-form", choices=ANSWER_FORMS, default="plain")
    parser.add_argument("--id", help="column with the id (default: row numbers)")
    for name in ("solution", "level", "subject"):
        parser.add_argument(f"--{name}", help=f"column with the {name}")
    parser.add_argument("--split", help="split of the hub dataset")
    parser.add_argument("--subset", help="subset of the hub dataset")
    parser.add_argument(
        "--remove-suffix", default="", help="text to remove from the end of questions"
    )
    parser.add_argument("--against", type=Path, action="append", default=[],
                        help="report questions that this file also contains")  # fmt: skip
    parser.add_argument("--skip-broken", action="store_true", help="leave broken rows out")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    try:
        counts = prepare(args)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{args.target}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))


if __name__ == "__main__":
    main()
