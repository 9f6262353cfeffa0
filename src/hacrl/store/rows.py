"""JSON files with check values, so that a changed or shortened file is noticed when it is read.

    {"step": 0, "reward": 0.4, "check": "5f0c9a1b2d3e"}

The last key of every JSON object is the start of the sha256 of the text before it. In a .jsonl file it
also covers the check value of the line before, so lines cannot be removed, swapped or added. The chain
of a file that is written at once begins with the number of its rows: a missing end is noticed, too.
Files that grow are counted in the run's counts.json. Reading verifies and removes the check values.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.files import append_line, changed, read_whole_lines, to_json, write_atomic

Row = dict[str, Any]

_KEY = '"check": "'


def seal(value: Mapping[Any, Any], before: str = "", indent: int | None = None) -> str:
    """JSON text of an object with its check value. `before` is the check value to chain to."""
    return _closed(to_json(value, indent)[:-1].rstrip(), before)


def unseal(text: str, before: str = "") -> str:
    """Verify the text of one object and return it without its check value; a ValueError if the two
    do not match."""
    body = text.rpartition(_KEY)[0].removesuffix(", ")
    if text != _closed(body, before):
        raise ValueError("the content does not match its check value")
    return body + "}"


def _closed(body: str, before: str) -> str:
    check = sha256((before + body).encode()).hexdigest()[:12]
    return f'{body}{"" if body == "{" else ", "}{_KEY}{check}"}}'


def _check(sealed: str) -> str:
    return sealed[-14:-2]


# ---------------------------------------------------------------- one object


def write_object(path: Path, value: Mapping[Any, Any], indent: int | None = None) -> None:
    """Write a file that holds one JSON object."""
    write_atomic(path, seal(value, indent=indent) + "\n")


def read_object(path: Path, way: str) -> Row:
    """Read what `write_object` wrote. If it is damaged, a UserError names the file and the `way` out."""
    try:
        found: Row = json.loads(unseal(path.read_bytes().decode().removesuffix("\n")))
    except FileNotFoundError as error:
        raise changed(path, "the file is missing", way) from error
    except ValueError as error:
        raise changed(path, str(error), way) from error
    return found


# ---------------------------------------------------------------- rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows of a file at once."""
    found = list(rows) or [{}]
    write_atomic(path, _chain(found, str(len(found))))


def _chain(rows: Iterable[Mapping[str, Any]], before: str) -> str:
    lines = []
    for row in rows:
        lines.append(seal(row, before) + "\n")
        before = _check(lines[-1][:-1])
    return "".join(lines)


def read_rows(path: Path, way: str) -> list[Row]:
    """Read what `write_rows` wrote; none if there is no such file. If it is damaged, a UserError names
    the file, the line and the `way` out."""
    lines = read_whole_lines(path, way)
    if path.is_file() and (not lines or not path.read_bytes().endswith(b"\n")):
        raise changed(path, f"line {len(lines) + 1}: the file is truncated", way)
    rows, error = _verified(path, lines, str(len(lines)), way)
    if error:
        raise error
    return [row for row in rows if row]


def _verified(
    path: Path, lines: Sequence[str], before: str, way: str, first: int = 1
) -> tuple[list[Row], UserError | None]:
    """The rows of a chain up to the first that does not verify, and the error that names it by its line,
    counted from `first`."""
    rows: list[Row] = []
    for number, line in enumerate(lines, start=first):
        try:
            rows.append(json.loads(unseal(line, before)))
        except ValueError as error:
            reason = f"line {number}: {error}; lines were changed, removed or added"
            return rows, changed(path, reason, way)
        before = _check(line)
    return rows, None


class RowLog:
    """A file that grows row by row. It has one writer, and any number of readers.

    Example: log = RowLog(run / "times.jsonl", "Delete it."); log.open(); log.add({"step": 0})
    """

    def __init__(self, path: Path, way: str) -> None:
        self.path, self.way = path, way
        self.count = 0  # rows in the file, after `open` or `replace`
        self._size: int | None = None
        self._last = ""

    def open(self) -> None:
        """Find the end of the file, to add rows there."""
        lines = read_whole_lines(self.path, self.way)
        self.count, self._last = len(lines), _check(lines[-1]) if lines else ""

    def read(self, least: int = 0) -> tuple[list[Row], UserError | None]:
        """The rows up to the first that is damaged, and the error that names it. An unfinished last
        line is left out. With fewer than `least` rows the end of the file is missing."""
        try:
            lines = read_whole_lines(self.path, self.way)
        except UserError as error:
            return [], error
        rows, damage = _verified(self.path, lines, "", self.way)
        if damage is None and len(rows) < least:
            reason = f"the end is missing: {len(rows)} of {least} rows"
            damage = changed(self.path, reason, self.way)
        return rows, damage

    def add(self, row: Mapping[str, Any], sync: bool = False) -> None:
        """Append a row. A UserError if the file is not as the last call left it."""
        if self._size not in (None, self._size_now()):
            raise changed(self.path, "it was deleted or changed while the run wrote it", self.way)
        line = seal(row, self._last)
        append_line(self.path, line, sync)
        self.count, self._last, self._size = self.count + 1, _check(line), self._size_now()

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the whole file."""
        text = _chain(rows, "")
        write_atomic(self.path, text)
        self.count, self._last, self._size = len(rows), _check(text[:-1]), len(text)

    def _size_now(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else -1


class RowTail:
    """Reads a file that grows, each row once, while another process writes it.

    Example: tail = RowTail(run / "metrics.jsonl", "Delete it."); tail.update(); tail.rows
    """

    def __init__(self, path: Path, way: str) -> None:
        self.path, self.way = path, way
        self.rows: list[Row] = []
        self._file: tuple[int, int] = (0, 0)  # inode and bytes read
        self._last = ""

    def update(self) -> UserError | None:
        """Append the new rows to `rows`. A file that was replaced or became shorter is read again from
        its start. Return the error that names the first damaged row; it and later rows are left out."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file[0] or found.st_size < self._file[1]:
                    self.rows, self._file, self._last = [], (found.st_ino, 0), ""
                file.seek(self._file[1])
                data = file.read()
        except FileNotFoundError:
            self.rows, self._file, self._last = [], (0, 0), ""
            return None
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode(errors="replace").split("\n")[:-1]
        rows, damage = _verified(self.path, lines, self._last, self.way, len(self.rows) + 1)
        if damage is None:
            self._file = (found.st_ino, self._file[1] + len(whole))
            self._last = _check(lines[-1]) if lines else self._last
            self.rows = self.rows + rows if rows else self.rows  # readers keep the list they have
        return damage
