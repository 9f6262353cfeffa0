"""scripts/prepare_data.py: answers are extracted, broken rows refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from prepare_data import parse_arguments, prepare

from hacrl.errors import UserError


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*arguments: object) -> dict[str, int]:
    return prepare(parse_arguments([str(a) for a in arguments]))


def test_math_solutions(tmp_path: Path) -> None:
    solution = r"Surely $\boxed{\frac{4}{2}}$, so $\boxed{ \{2\} }$."
    source = write_lines(
        tmp_path / "math.jsonl",
        [
            {"problem": "Half of $4$? Box it.", "solution": solution, "level": "Level 3"},
            {"problem": "One?", "solution": r"It is $\boxed 1$.", "level": "?"},
        ],
    )
    test = write_lines(tmp_path / "test.jsonl", [{"question": "ONE ?", "answer": "1"}])
    target = tmp_path / "out" / "mine.jsonl.gz"
    columns = ["--question", "problem", "--answer", "solution", "--solution", "solution"]
    options = [
        "--answer-form",
        "boxed",
        "--level",
        "level",
        "--remove-suffix",
        "Box it.",
        "--against",
        test,
    ]
    counts = run(source, target, *columns, *options)
    assert counts["rows"] == 2 and counts["broken_rows_left_out"] == 0
    assert counts["unread_levels"] == counts["questions_in_test.jsonl"] == 1
    first, second = map(json.loads, gzip.decompress(target.read_bytes()).decode().splitlines())
    extra = {"solution": solution, "level": 3, "source": "math.jsonl row 0"}
    assert first == {"id": "mine-0", "question": "Half of $4$?", "answer": r"\{2\}", **extra}
    assert second["answer"] == "1" and "level" not in second


def test_broken_rows_are_refused_unless_skipped(tmp_path: Path) -> None:
    answers = ["so 1,000 + 234\n#### 1,234", "no mark", "####"]
    rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    source, target = write_lines(tmp_path / "gsm.jsonl", rows), tmp_path / "g.jsonl"
    with pytest.raises(UserError, match=r"2 of 3 rows are broken(.|\n)*line 2: no '####'"):
        run(source, target, "--answer-form", "hashes")
    assert not target.exists()
    counts = run(source, target, "--answer-form", "hashes", "--skip-broken")
    assert (counts["rows"], counts["broken_rows_left_out"]) == (1, 2)
    assert json.loads(target.read_text())["answer"] == "1234"
    with pytest.raises(UserError, match=r"must end in .jsonl or .jsonl.gz"):
        run(source, tmp_path / "g.json")
