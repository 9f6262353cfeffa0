"""Rows of data files: JSONL, CSV, both also as .gz, Parquet, and datasets of the Hugging Face hub."""

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hacrl.errors import UserError

LONGEST_CELL = 10_000_000
"""Characters of a CSV cell; more is an error, usually of a quotation mark that is not closed."""


@dataclass(frozen=True)
class Row:
    """One row and its place in the file.

    Example: Row("train.jsonl, line 7", 6, {"id": "a", "question": "1 + 1?", "answer": "2"})
    """

    where: str  # for error messages
    number: int  # counted from 0
    values: dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a data file; UserError for a file that is missing, empty or broken."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a .jsonl, .csv or .parquet file in it")
    if path.name.endswith((".jsonl", ".jsonl.gz", ".json.gz", ".json")):
        rows = list(_json_lines(path))
    elif path.name.endswith((".csv", ".csv.gz")):
        rows = list(_csv(path))
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        raise UserError(
            f"{path}: not a .jsonl, .csv or .parquet file (.jsonl.gz and .csv.gz work too)"
        )
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
    types = {column: str(getattr(kind, "dtype", "")) for column, kind in data.features.items()}
    rows = [
        Row(f"{name}, {split} row {i}", i, _as_written(dict(values), types))
        for i, values in enumerate(data)
    ]
    if not rows:
        raise UserError(f"{name}: the split {split!r} is empty")
    return rows


@contextmanager
def _opened(path: Path, **options: Any) -> Iterator[IO[Any]]:
    """The file, decompressed if its name ends in .gz."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, **options) as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from error


def _json_lines(path: Path) -> Iterator[Row]:
    number = 0
    with _opened(path, mode="rb") as stream:
        for line_number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{path}, line {line_number}"
                yield Row(where, number, _json_object(line, where))
                number += 1


def _csv(path: Path) -> Iterator[Row]:
    """Rows of a CSV file with a header line. Every value is text; a row begins in the line named."""
    csv.field_size_limit(LONGEST_CELL)
    with _opened(path, mode="rt", encoding="utf-8-sig", newline="") as stream:
        reader, line = csv.reader(stream, strict=True), 1
        try:
            names = next(reader, [])
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise UserError(
                    f"{path}, line 1: the header must name every column once, not {names}"
                )
            if len(names) == 1 and (found := set(names[0]) & {";", "\t"}):
                raise UserError(
                    f"{path}, line 1: the header has no comma but {found.pop()!r}; save the file with "
                    "commas between the cells"
                )
            line, number = reader.line_num + 1, 0
            for cells in reader:
                where, line = f"{path}, line {line}", reader.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise UserError(
                        f"{where}: {len(cells)} cells, but the header has {len(names)} columns "
                        f"({', '.join(names)}); quote cells that contain a comma"
                    )
                yield Row(where, number, dict(zip(names, cells, strict=True)))
                number += 1
        except csv.Error as error:
            raise UserError(f"{path}, line {line}: not CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {line}: not UTF-8 text ({error.reason})") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason})") from error
    except UnicodeEncodeError as error:  # JSON can express what UTF-8 cannot
        raise UserError(
            f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not text"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON: {error.msg} at column {error.colno}; every line must be one JSON "
            "object"
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: too many levels of lists and objects") from error
    except ValueError as error:
        text = str(error)
        problem = "a number has too many digits; write it as text" if "digits" in text else text
        raise UserError(f"{where}: {problem}") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: a {type(values).__name__}; every line must be one JSON object")
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError for a key that appears twice: one of its values would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return values


def _parquet(path: Path) -> list[Row]:
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
    names = {"float": "float32", "halffloat": "float16"}
    types = {field.name: names.get(str(field.type), "") for field in table.schema}
    return [
        Row(f"{path}, row {i}", i, _as_written(values, types))
        for i, values in enumerate(table.to_pylist())
    ]


def _as_written(values: dict[str, Any], types: dict[str, str]) -> dict[str, Any]:
    """The row with its short floats as they were written: a 0.1 of 32 bits comes from the file as
    0.10000000149011612."""
    if not {"float16", "float32"} & set(types.values()):
        return values
    import numpy as np

    narrow = {"float16": np.float16, "float32": np.float32}
    return {
        name: float(str(narrow[types[name]](value)))
        if types.get(name) in narrow and isinstance(value, float)
        else value
        for name, value in values.items()
    }
