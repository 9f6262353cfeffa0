"""Rows of data files: JSONL, CSV, both also as .gz, Parquet, and datasets of the Hugging Face hub."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import UserError

LONGEST_CELL = 10_000_000
"""Characters of a CSV cell; more is an error, usually of a quotation mark that is not closed."""


@dataclass(frozen=True)
class Row:
    """One row and its place in the file.

    Example: Row("train.jsonl, line 7", {"id": "a", "question": "1 + 1?", "answer": "2"})
    """

    where: str  # for error messages
    values: dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a data file; UserError for a file that is missing, empty or broken."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a .jsonl, .csv or .parquet file in it")
    readers = {".jsonl": _json_lines, ".json": _json_lines, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(Path(path.name.removesuffix(".gz")).suffix)
    if reader is None:
        raise UserError(
            f"{path}: not a .jsonl, .csv or .parquet file (.jsonl.gz and .csv.gz work too)"
        )
    try:
        rows = list(reader(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from error
    if not rows:
        raise UserError(f"{path}: the file is empty")
    return rows


def hub_rows(name: str, subset: str | None, split: str) -> list[Row]:
    """All rows of one split of a dataset, given by its name on the hub or its folder."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"task.train = {name!r}: hub datasets need the package datasets: "
            "pip install 'hacrl[data]'"
        ) from error
    try:
        data = datasets.load_dataset(name, subset, split=split)
    except (ValueError, OSError) as error:  # unknown name, subset or split; no connection
        raise UserError(
            f"task.train = {name!r} (subset {subset!r}, split {split!r}) cannot be loaded: {error}"
        ) from error
    rows = [Row(f"{name}, {split} row {i}", dict(values)) for i, values in enumerate(data)]
    if not rows:
        raise UserError(f"{name}: the split {split!r} is empty")
    return rows


def _json_lines(path: Path) -> Iterator[Row]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield Row(where, _json_object(line, where))


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason})") from error
    except UnicodeEncodeError as error:  # JSON can express what UTF-8 cannot
        raise UserError(
            f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not text"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, deep nesting
        raise UserError(
            f"{where}: not JSON: {error}; every line must be one JSON object"
        ) from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: a {type(values).__name__}; every line must be one JSON object")
    return values


def _csv(path: Path) -> Iterator[Row]:
    """Rows of a CSV file with a header line. Every value is text; a row ends in the line named."""
    csv.field_size_limit(LONGEST_CELL)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            names = list(reader.fieldnames or [])
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise UserError(
                    f"{path}, line 1: the header must name every column once, not {names}"
                )
            for values in reader:
                where = f"{path}, line {reader.line_num}"
                if None in values or None in values.values():
                    raise UserError(
                        f"{where}: the row must have {len(names)} cells, as the header "
                        f"({', '.join(names)}); quote cells that contain a comma"
                    )
                yield Row(where, values)
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.reader.line_num}: not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path}: Parquet files need the package pyarrow: pip install 'hacrl[data]'"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error
    for i, values in enumerate(table.to_pylist()):
        yield Row(f"{path}, row {i}", values)
