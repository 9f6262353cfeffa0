"""`hacrl data fetch` from folders, from a real server, and with everything that can be missing."""

import gzip
import json
import socket
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cli_helpers import accepted, hacrl

from hacrl.errors import UserError
from hacrl.study.benchmarks.catalogue import MATH7, load_problems
from hacrl.tasks import fetch as fetching
from hacrl.tasks.fetch import SOURCES, fetch

SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
SOLUTION = r"Surely $\boxed{\frac{4}{2}}$, so $\boxed{ \{2\} }$."


def write_lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small files at the places where the repositories have theirs; the problems are made up."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "source"
    truth = [
        {"question": f"Half of $4$?{SUFFIX}", "solution": SOLUTION, "target": "x"},
        {"question": f" One?{SUFFIX}", "solution": r"It is $\boxed 1$.", "target": "x"},
    ]
    rows = [
        {"level": level, "type": "Algebra", "reward_model": {"ground_truth": t}}
        for level, t in zip(("Level 3", "Level ?"), truth, strict=True)
    ]
    (folder / "data/math").mkdir(parents=True)
    for part in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"data/math/{part}.parquet")
        gsm = {"question": "How much?", "answer": "1,000 + 234\n#### 1,234"}
        write_lines(folder / f"grade_school_math/data/{part}.jsonl", gsm)
    oai = {"problem": "Price?", "answer": r"\$36", "solution": "s", "level": 2, "subject": "A"}
    write_lines(folder / "data/math_oai/test.jsonl", oai)
    data = folder / "evaluation/data"
    write_lines(data / "amc23/test.jsonl", {"id": 7, "question": "Sum?", "answer": 27.0})
    minerva = {"idx": 3, "problem": "v?", "solution": r"\boxed{a+$ $b}", "type": "Physics"}
    write_lines(data / "minerva_math/test.jsonl", minerva)
    bench = {"id": 1606, "question": "N?", "solution": ["one", "two"], "subfield": "Algebra"}
    write_lines(data / "olympiadbench/test.jsonl", bench | {"final_answer": ["$x=1$.", "$2$"]})
    for part in ("I", "II"):
        aime = folder / f"data/aime/aime_2025_{part}"
        (aime / "problems").mkdir(parents=True)
        (aime / "answers.csv").write_text("id,answer\n1,70\n")
        (aime / "problems/1.tex").write_text(f"Part {part}?\n")
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return [json.loads(line) for line in text.splitlines()]


def test_all_data_sets_from_a_folder(folder: Path, tmp_path: Path) -> None:
    """The command writes all nine, in the form that tasks and benchmarks read."""
    out = tmp_path / "data"
    _, err = accepted("data", "fetch", "all", "--from", folder, "--out", out, "--accept-changed")
    assert "accepted: math_train: 2 rows with sha256" in err and "gives 7500 rows" in err
    assert "licence: MIT (OpenAI, 2021)" in err and "Do not redistribute" in err
    algebra = {"solution": SOLUTION, "level": 3, "subject": "Algebra"}
    first, second = read(out / "math_train.jsonl.gz")
    half = {"id": "math_train-0", "question": "Half of $4$?", "answer": r"\{2\}"}
    assert first == half | algebra
    assert (second["question"], second["answer"], "level" in second) == ("One?", "1", False)
    answers = {"gsm8k_test": "1234", "math500": r"\$36", "amc23": "27", "minerva": "a+ b"}
    for name, answer in answers.items():
        assert read(out / f"{name}.jsonl")[0]["answer"] == answer
    assert read(out / "olympiadbench.jsonl") == [
        {"id": "olympiadbench-1606", "question": "N?", "answer": "x=1, 2"}
        | {"solution": "one\n\ntwo", "subject": "Algebra"}
    ]
    assert read(out / "aime25.jsonl") == [
        {"id": f"aime25-{part}-1", "question": f"Part {part}?", "answer": "70"}
        for part in ("I", "II")
    ]
    for benchmark in MATH7:
        assert load_problems(benchmark, out)
    kinds = [row["kind"] for row in read(out / "known_issues.jsonl")]
    assert (kinds.count("same_question_in_test_set"), len(kinds)) == (7, 332)


def test_known_issues_hold_no_texts() -> None:
    for row in read(fetching.KNOWN_ISSUES):
        assert row.keys() == {"set", "id", "kind"} and row["id"].startswith(f"{row['set']}-")


def test_other_rows_than_the_pinned_ones_are_refused(folder: Path, tmp_path: Path) -> None:
    """As from a clone at another revision. Nothing is written."""
    command = ("data", "fetch", "amc23", "--from", folder, "--out", tmp_path / "data")
    code, _, err = hacrl(*command)
    assert code == 2 and "QwenLM/Qwen2.5-Math at a45202bd16f1 gives 40 rows" in err
    assert "--accept-changed" in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "data").exists()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_download(folder: Path, address: str, tmp_path: Path) -> None:
    """The same bytes from a server as from its folder; a missing file names the way out."""
    for name in ("aime25", "math_test"):
        files = [
            fetch(name, tmp_path / kind, source, True, lambda _: None)
            for kind, source in (("net", address), ("disk", str(folder)))
        ]
        assert files[0].read_bytes() == files[1].read_bytes()
    (folder / "data/math_oai/test.jsonl").unlink()
    with pytest.raises(UserError, match=r"math_oai/test.jsonl cannot be .*404.*--from FOLDER"):
        fetch("math500", tmp_path, address)


def test_what_can_be_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(
            fetching, "URL", f"http://127.0.0.1:{taken.getsockname()[1]}/{{revision}}"
        )
        with pytest.raises(UserError, match=r"cannot be downloaded .*refused.*--from FOLDER"):
            fetch("amc23", tmp_path)
    with pytest.raises(UserError, match="'math' is unknown; there are: math_train, math_test"):
        fetch("math", tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        fetch("amc23", tmp_path, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has no file evaluation/data/amc23/test.jsonl; --from"):
        fetch("amc23", tmp_path, str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'hacrl\[data\]'"):
        fetch("math_train", tmp_path, str(folder))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "no mark"}, "line 1: no '####'"),
        ({"question": "q", "answer": "####"}, "line 1: the answer is empty"),
        ({"question": " ", "answer": "#### 1"}, "line 1: the question is empty"),
        ({"question": "q"}, "no column 'answer'; the columns are: question"),
    ],
)
def test_broken_rows_are_refused(
    folder: Path, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    write_lines(folder / "grade_school_math/data/test.jsonl", row)
    with pytest.raises(UserError, match=message):
        fetch("gsm8k_test", tmp_path, str(folder), accept_changed=True)


def test_sources_are_pinned() -> None:
    assert {b.name for b in MATH7} | {"math_train", "gsm8k_train"} == set(SOURCES)
    for source in SOURCES.values():
        assert len(source.revision) == 40 and len(source.sha256) == 64
