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
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.files import changed, to_json, write_atomic

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


def write_object(
    path: Path, value: Mapping[Any, Any], indent: int | None = None, replace: bool = True
) -> None:
    """Write a file that holds one JSON object. With replace=False an existing file is an error."""
    write_atomic(path, seal(value, indent=indent) + "\n", replace)


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
    if not path.is_file():
        return []
    *lines, rest = path.read_bytes().decode(errors="replace").split("\n")
    if rest or not lines:
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

    Example: log = RowLog(run / "times.jsonl", "Delete it."); log.add({"step": 0})
    """

    def __init__(self, path: Path, way: str) -> None:
        self.path, self.way = path, way
        self.count = 0  # rows read or written
        self._rows: list[Row] = []  # rows read; never changed in place
        self._inode = self._end = 0  # the file, and the size of its rows
        self._last = ""  # check value of the last row

    def read(self, least: int = 0) -> tuple[list[Row], UserError | None]:
        """The rows up to the first that is damaged, and the error that names it. An unfinished last
        line is left out. With fewer than `least` rows the end of the file is missing. A later call
        reads only new rows, unless the file was replaced or became shorter."""
        inode, start, data = 0, 0, b""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
            if inode == self._inode and size >= self._end and self.count == len(self._rows):
                start = self._end
            file.seek(start)
            data = file.read()
        if not start:
            self.count, self._rows, self._inode, self._end, self._last = 0, [], inode, 0, ""
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode(errors="replace").split("\n")[:-1]
        rows, damage = _verified(self.path, lines, self._last, self.way, self.count + 1)
        if damage:
            return self._rows + rows, damage
        if rows:
            self._rows, self._last = self._rows + rows, _check(lines[-1])
            self.count, self._end = len(self._rows), self._end + len(whole)
        if self.count < least:
            reason = f"the end is missing: {self.count} of {least} rows"
            damage = changed(self.path, reason, self.way)
        return self._rows, damage

    def add(self, row: Mapping[str, Any], sync: bool = False) -> None:
        """Append a row. A UserError if the file is damaged, or is not as the last call left it."""
        if not self._end and (error := self.read()[1]):
            raise error
        size = self.path.stat().st_size if self.path.is_file() else 0
        rest = self.path.read_bytes()[self._end :] if size > self._end else b""
        if size < self._end or b"\n" in rest:
            raise changed(self.path, "it was deleted or changed while the run wrote it", self.way)
        if rest:  # an incomplete line that a kill or a full disk left
            os.truncate(self.path, self._end)
        line = seal(row, self._last)
        append_line(self.path, line, sync)
        self.count, self._last, self._end = self.count + 1, _check(line), self._end + len(line) + 1

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the whole file."""
        write_atomic(self.path, _chain(rows, ""))
        self.read()


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Append one line to a file that has no other writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(file.fileno())
