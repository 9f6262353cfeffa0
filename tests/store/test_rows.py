"""Check values: every flip, truncation, removed or swapped line is noticed and named."""

import json
import math
from pathlib import Path

import pytest

from hacrl.errors import UserError
from hacrl.store.rows import RowLog, read_object, read_rows, write_object, write_rows

ROWS = [{"step": i, "text": f"é{i}", "value": [i, None, 0.1 * i]} for i in range(4)]
WAY = "Do this."


@pytest.fixture
def log(tmp_path: Path) -> RowLog:
    log = RowLog(tmp_path / "rows.jsonl", WAY)
    for row in ROWS:
        log.add(row)
    return log


def read_all(log: RowLog) -> list:
    rows, error = log.read(least=4)
    if error:
        raise error
    return rows


@pytest.mark.parametrize("kind", ["once", "growing", "object"])
def test_every_flipped_or_missing_byte_is_noticed_or_harmless(kind: str, log: RowLog) -> None:
    path = log.path
    value = {"baselines": ROWS, "score": 0.5}
    if kind == "once":
        write_rows(path, ROWS)
    elif kind == "object":
        write_object(path, value, indent=1)
    read = {
        "once": lambda: read_rows(path, WAY),
        "growing": lambda: read_all(log),
        "object": lambda: read_object(path, WAY),
    }[kind]
    before, data = read(), path.read_bytes()
    assert before == (value if kind == "object" else ROWS)
    harmless = 0
    for place in range(len(data)):
        for changed in (
            data[:place],
            data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :],
            data[:place] + bytes(8) + data[place + 8 :],
        ):
            path.write_bytes(changed)
            try:
                found = read()
            except UserError as error:
                found = str(error)
            named = isinstance(found, str) and str(path) in found and WAY in found
            assert named or found == before
            harmless += not named
    assert harmless <= 1  # the line break after an object


def swapped(lines: list[str]) -> list[str]:
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (swapped, 1),
        (lambda lines: lines[:1] + lines[2:], 2),
        (lambda lines: [*lines, lines[-1]], 5),
    ],
)
def test_swapped_removed_and_repeated_lines_are_noticed(log: RowLog, change, line: int) -> None:
    log.path.write_text("".join(change(log.path.read_text().splitlines(keepends=True))))
    rows, error = log.read()
    assert rows == (ROWS[: line - 1] if line > 1 else []) and f"line {line}" in str(error)
    write_rows(log.path, ROWS)
    log.path.write_text("".join(change(log.path.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match="line 1"):  # the number of rows is part of the first check
        read_rows(log.path, WAY)


def test_a_growing_file_may_end_with_an_unfinished_line(log: RowLog) -> None:
    with open(log.path, "a") as file:
        file.write('{"step": 4, "te')
    assert log.read() == (ROWS, None)
    again = RowLog(log.path, WAY)
    again.add({"step": 4})
    assert log.read() == again.read() == ([*ROWS, {"step": 4}], None)
    assert "the end is missing: 5 of 6 rows" in str(again.read(least=6)[1])
    again.replace(ROWS[:1])  # shorter than what `log` has read
    assert log.read() == (ROWS[:1], None)


def test_a_file_deleted_or_cut_while_it_is_written_is_noticed(log: RowLog) -> None:
    data = log.path.read_bytes()
    for damage in (log.path.unlink, lambda: log.path.write_bytes(data[:-9])):
        damage()
        with pytest.raises(UserError, match="deleted or changed while the run wrote it"):
            log.add({"step": 4})


def test_no_rows_differ_from_a_file_cut_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path, WAY) == []
    write_rows(path, [])
    assert read_rows(path, WAY) == []
    path.write_bytes(b"")
    with pytest.raises(UserError, match="truncated"):
        read_rows(path, WAY)


def test_files_hold_no_nan_and_no_infinity(tmp_path: Path) -> None:
    """FAULTS D6: samples held `Infinity`, which is not JSON."""
    bad = {"ratio": math.inf, "rows": [(1.5, math.nan), {"a": -math.inf}], "n": 3}
    write_rows(tmp_path / "rows.jsonl", [bad])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads((tmp_path / "rows.jsonl").read_text(), parse_constant=refuse)
    found = read_rows(tmp_path / "rows.jsonl", WAY)
    assert found == [{"ratio": None, "rows": [[1.5, None], {"a": None}], "n": 3}]


def test_lines_of_a_second_writer_are_an_error(tmp_path: Path) -> None:
    """An unfinished line, which a kill leaves, is removed; whole lines are not."""
    log = RowLog(tmp_path / "rows.jsonl", "Delete it")
    log.add({"step": 0})
    with open(log.path, "ab") as file:
        file.write(b'{"step"')
    log.add({"step": 1})
    assert [row["step"] for row in log.read()[0]] == [0, 1]
    with open(log.path, "ab") as file:
        file.write(b'{"step": 2}\n')
    with pytest.raises(UserError, match="changed while the run wrote it"):
        log.add({"step": 3})
