r"""`hacrl data fetch NAME`: download a data set of the paper and write it in the form that tasks read.

datasets.toml lists the data sets. The result has one JSON object per line: `id`, `question`, `answer`
(the final answer only, without `$` and `\boxed{}`, never empty), and if the source has them `solution`,
`level` (1 to 5) and `subject`. known_issues.jsonl (ids and kinds) is written into the same folder.
"""

import gzip
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.request import urlopen

from pydantic import TypeAdapter

from hacrl.errors import UserError
from hacrl.store.files import write_atomic
from hacrl.tasks.rows import Row, read_rows
from hacrl.verify.extract import boxes

URL = "https://raw.githubusercontent.com/{repository}/{revision}"
KNOWN_ISSUES = Path(__file__).with_name("known_issues.jsonl")


@dataclass(frozen=True)
class Source:
    """Where a data set comes from; datasets.toml explains the fields.

    Example: SOURCES["gsm8k_test"]
    """

    title: str
    repository: str
    revision: str
    files: tuple[str, ...]
    columns: Mapping[str, str]
    rows: int
    sha256: str
    licence: str
    rights: str = ""
    answer: Literal["plain", "hashes", "boxed"] = "plain"
    prefixes: tuple[str, ...] = ()
    remove: str = ""
    filled: Mapping[str, str] = field(default_factory=dict)
    packed: bool = False


SOURCES: dict[str, Source] = TypeAdapter(dict[str, Source]).validate_python(
    tomllib.loads(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
)


def fetch(
    name: str,
    out: Path,
    source: str = "",
    accept_changed: bool = False,
    report: Callable[[str], None] = print,
) -> Path:
    """Write the data set `name` into the folder `out` and return the file.

    `source` is a folder, or the address of one, with the files as the repository has them; without it
    they are downloaded. Rows or a checksum other than the pinned ones are refused unless
    `accept_changed`.
    """
    if name not in SOURCES:
        raise UserError(f"data set {name!r} is unknown; there are: {', '.join(SOURCES)}")
    data = SOURCES[name]
    with TemporaryDirectory(prefix="hacrl-") as scratch:
        place = _place(data, source or URL.format_map(vars(data)), Path(scratch))
        results = [convert(row, name, data) for row in _rows(data, place)]
    lines = "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results).encode()
    found = hashlib.sha256(lines).hexdigest()
    if (len(results), found) != (data.rows, data.sha256):
        text = (
            f"{name}: {len(results)} rows with sha256 {found[:12]}, but {data.repository} at "
            f"{data.revision[:12]} gives {data.rows} rows with {data.sha256[:12]}"
        )
        if not accept_changed:
            raise UserError(f"{text}. Use the pinned revision, or accept with --accept-changed")
        report(f"accepted: {text}")
    target = out / f"{name}.jsonl{'.gz' if data.packed else ''}"
    # mtime=0: the same rows give the same file.
    write_atomic(target, gzip.compress(lines, mtime=0) if data.packed else lines)
    write_atomic(out / KNOWN_ISSUES.name, KNOWN_ISSUES.read_bytes())
    report(f"{target}: {data.title}, {len(results)} rows")
    report(f"licence: {data.licence}. {data.rights}".rstrip())
    return target


def _place(data: Source, source: str, scratch: Path) -> Callable[[str], Path]:
    """A function from a path in the repository to a local file."""
    if "://" in source:
        return lambda path: _download(f"{source.rstrip('/')}/{path}", scratch / path)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise UserError(f"--from {source}: no such folder")

    def local(path: str) -> Path:
        if not (folder / path).is_file():
            raise UserError(
                f"{folder} has no file {path}; --from needs the files as {data.repository} has them"
            )
        return folder / path

    return local


def _download(url: str, target: Path) -> Path:
    try:
        with urlopen(url, timeout=60) as answer:
            content = answer.read()
    except OSError as error:  # also HTTPError and URLError
        raise UserError(
            f"{url} cannot be downloaded ({error}). Give a folder with a copy of the repository: "
            "--from FOLDER"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target


def _rows(data: Source, place: Callable[[str], Path]) -> Iterator[Row]:
    """Rows of all files. The values of `columns` are looked up here; ids have their prefix."""
    for path, prefix in zip(data.files, data.prefixes or [""] * len(data.files), strict=True):
        for number, row in enumerate(read_rows(place(path))):
            found: dict[str, Any] = {"id": number}
            for key, column in data.columns.items():
                if "{" in column:
                    beside = place(f"{path.rpartition('/')[0]}/{column.format_map(row.values)}")
                    found[key] = beside.read_text(encoding="utf-8")
                else:
                    found[key] = _look_up(row, column)
            yield Row(row.where, found | {"id": f"{prefix}{found['id']}"})


def _look_up(row: Row, column: str) -> Any:
    try:
        return reduce(lambda values, name: values[name], column.split("."), row.values)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{row.where}: no column {column!r}; the columns are: {', '.join(row.values)}"
        ) from error


def convert(row: Row, name: str, data: Source) -> dict[str, Any]:
    """One row of the result; UserError for a broken row."""
    values = row.values
    result: dict[str, Any] = {"id": f"{name}-{values['id']}"}
    result["question"] = str(values["question"]).strip().removesuffix(data.remove).strip()
    try:
        answer = data.filled.get(result["id"]) or ANSWERS[data.answer](values["answer"])
    except ValueError as error:
        raise UserError(f"{row.where}: {error}") from error
    if not result["question"] or not answer:
        empty = "answer" if result["question"] else "question"
        raise UserError(f"{row.where}: the {empty} is empty")
    result["answer"] = answer
    if "solution" in values:
        parts = values["solution"]
        result["solution"] = "\n\n".join(parts) if isinstance(parts, list) else parts
    if level := re.search(r"[1-5]", str(values.get("level", ""))):
        result["level"] = int(level[0])
    if "subject" in values:
        result["subject"] = values["subject"]
    return result


def plain(value: Any) -> str:
    """The column is the answer: a number, a text, or a list of texts. `$` signs and the full stop after
    them are removed.

    Example: plain(27.0) == "27"; plain(["$x=1$.", "$2$"]) == "x=1, 2"
    """
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return re.sub(r"(?<!\\)\$\.?$|(?<!\\)\$", "", str(value).strip()).strip()


def after_hashes(text: str) -> str:
    """GSM8K: a solution whose last line is `#### 1,200`."""
    _, mark, answer = text.rpartition("####")
    if not mark:
        raise ValueError(f"no '####' in {text[-60:]!r}")
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())


def boxed(text: str) -> str:
    r"""MATH: a solution with the answer in its last `\boxed{...}` or `\boxed 7`."""
    if not (found := boxes(text)):
        raise ValueError(f"no complete \\boxed in {text[-60:]!r}")
    return found[-1][2].replace("$ $", " ").strip()


ANSWERS: dict[str, Callable[[Any], str]] = {
    "plain": plain,
    "hashes": after_hashes,
    "boxed": boxed,
}
