"""Whole or not at all: kills at every file operation, and disks without room."""

from __future__ import annotations

import subprocess

import pytest
from breaking import in_little_room, kill_everywhere, names

from hacrl.errors import UserError
from hacrl.store.files import (
    append_line,
    read_whole_lines,
    remove_whole,
    sweep,
    whole_folder,
    write_atomic,
)


def test_write_atomic(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["file.txt"]
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    assert path.stat().st_mode == ordinary.stat().st_mode  # as readable as any other file


def test_write_atomic_killed_anywhere(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "file").write_text("old")
    left = kill_everywhere(
        base,
        tmp_path / "copies",
        "from hacrl.store.files import write_atomic",
        "write_atomic(folder / 'file', 'new' * 1000)",
    )
    found = [(folder / "file").read_text() for folder in left]
    assert set(found) == {"old", "new" * 1000}
    assert found[0] == "old"
    assert found[-1] != "old"
    assert any(len(names(folder)) > 1 for folder in left)  # some kills do leave something behind
    for folder in left:
        sweep(folder)
        assert names(folder) == ["file"]


def test_append_line_mends_a_torn_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"a": 1}')
    append_line(path, "é", sync=True)
    for torn in ("half a li", "x" * 200_000):
        with path.open("a") as file:
            file.write(torn)
        assert read_whole_lines(path) == ['{"a": 1}', "é"]
    append_line(path, "next")
    assert path.read_text() == '{"a": 1}\né\nnext\n'
    path.write_text("torn from the start")
    append_line(path, "first")
    assert path.read_text() == "first\n"
    with pytest.raises(ValueError, match="line break"):
        append_line(path, "a\nb")


def test_read_whole_lines_splits_at_line_feeds_only(tmp_path):
    path = tmp_path / "lines"
    assert read_whole_lines(path) == []
    path.write_bytes("a\u2028b\r\n\nc".encode())
    assert read_whole_lines(path) == ["a\u2028b\r", ""]
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        read_whole_lines(path)


def test_whole_folder(tmp_path):
    place = tmp_path / "runs" / "model"
    with whole_folder(place) as new:
        (new / "a").write_text("1")
        (new / "sub").mkdir()
        (new / "sub" / "b").write_text("2")
        assert not place.exists()
    assert names(place) == ["a", "sub"]
    with whole_folder(place) as new:
        (new / "c").write_text("3")
    assert names(place) == ["c"]
    with pytest.raises(FileNotFoundError), whole_folder(place) as new:
        (new / "no such folder" / "d").write_text("4")
    assert names(place) == ["c"]
    assert names(place.parent) == ["model"]


def test_whole_folder_and_removal_killed_anywhere(tmp_path):
    """One folder is replaced and another removed. The moment between the two renames of the
    replacement, when neither has the name, is mended by sweep."""
    base = tmp_path / "base"
    for name in ("kept", "gone"):
        (base / name).mkdir(parents=True)
        (base / name / "one").write_text("old")
        (base / name / "two").write_text("old")
    left = kill_everywhere(
        base,
        tmp_path / "copies",
        "from hacrl.store.files import remove_whole, whole_folder",
        "with whole_folder(folder / 'kept') as new:\n"
        "    for name in ('one', 'two'): (new / name).write_text('new')\n"
        "remove_whole(folder / 'gone')",
    )
    assert any(not (folder / "kept").exists() for folder in left)
    for folder in left:
        sweep(folder)
        assert set(names(folder)) <= {"kept", "gone"}
        for name in names(folder):
            texts = {(folder / name / part).read_text() for part in ("one", "two")}
            assert texts in ({"old"}, {"new"})
        assert (folder / "kept").exists()
    assert names(left[-1]) == ["kept"]


def test_sweep_reaches_inner_folders_and_spares_the_rest(tmp_path):
    inner = tmp_path / "journal" / "ant"
    inner.mkdir(parents=True)
    (inner / ".tmp-step-1-abcd").write_text("half")
    (inner / "step-0").write_text("whole")
    (inner / ".hidden").write_text("mine")
    sweep(tmp_path)
    assert names(inner) == [".hidden", "step-0"]
    sweep(tmp_path / "not there")


def test_remove_whole(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    remove_whole(tmp_path / "a")
    assert names(tmp_path) == []


LITTLE_ROOM = """
import sys
from pathlib import Path
from hacrl.errors import UserError
from hacrl.store.files import append_line, whole_folder, write_atomic

folder = Path(sys.argv[1])
def folder_of_files():
    with whole_folder(folder / "model") as new:
        (new / "a").write_text("small")
        (new / "b").write_text("x" * 20_000)
for job in (
    lambda: write_atomic(folder / "file", "x" * 20_000),
    lambda: append_line(folder / "lines", "x" * 20_000),
    folder_of_files,
):
    try:
        job()
    except UserError as error:
        print(error)
"""


def test_a_full_disk_says_so_and_leaves_the_old_state(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "lines").write_text("old\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("old")
    said = in_little_room(10_000, LITTLE_ROOM, tmp_path).splitlines()
    assert len(said) == 3
    for name, message in zip(("file", "lines", "model"), said, strict=True):
        assert message.startswith(str(tmp_path / name))
        assert "MB free" in message
        assert "free space, then `hacrl resume RUN`" in message
    assert names(tmp_path) == ["file", "lines", "model"]
    assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "lines").read_text() == "old\n"
    assert names(tmp_path / "model") == ["a"]


def test_a_really_full_disk(tmp_path):
    """The same on a file system of 64 KB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount here")
    try:
        append_line(disk / "lines", "old")
        with pytest.raises(UserError, match=r"No space left.*free"):
            append_line(disk / "lines", "x" * 100_000)
        with pytest.raises(UserError, match="No space left"):
            write_atomic(disk / "file", b"x" * 100_000)
        with pytest.raises(UserError, match="No space left"), whole_folder(disk / "f") as new:
            (new / "a").write_bytes(b"x" * 100_000)
        assert names(disk) == ["lines"]
        assert read_whole_lines(disk / "lines") == ["old"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
