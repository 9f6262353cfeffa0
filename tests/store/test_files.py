"""Atomic writes: kills at every file operation."""

import os

import pytest
from breaking import kill_everywhere, names

from hacrl.store.files import remove_whole, steps_in, sweep, whole_folder, write_atomic


def test_write_atomic(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    write_atomic(path, b"two")
    with pytest.raises(FileExistsError):
        write_atomic(path, b"three", replace=False)
    assert path.read_bytes() == b"two"
    write_atomic(path.with_name("new"), b"new", replace=False)
    assert names(path.parent) == ["file.txt", "new"]
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    assert path.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize(
    ("job", "after"),
    [
        ("write_atomic(folder / 'file', 'new' * 1000)", "new" * 1000),
        ("write_atomic(folder / 'other', 'new' * 1000, replace=False)", "old"),
    ],
)
def test_write_atomic_killed_anywhere(tmp_path, job, after):
    base = tmp_path / "base"
    base.mkdir()
    (base / "file").write_text("old")
    left = kill_everywhere(
        base, tmp_path / "copies", "from hacrl.store.files import write_atomic", job
    )
    found = [(folder / "file").read_text() for folder in left]
    assert set(found) == {"old", after} and found[0] == "old" and found[-1] == after
    assert any(list(folder.glob(".*")) for folder in left)  # some kills do leave something behind
    for folder in left:
        sweep(folder)
        assert set(names(folder)) <= {"file", "other"}
        if (folder / "other").exists():
            assert (folder / "other").read_text() == "new" * 1000


def test_whole_folder(tmp_path):
    place = tmp_path / "runs" / "model"
    with whole_folder(place) as new:
        (new / "a").write_text("1")
        (new / "sub").mkdir()
        os.close(os.open(new / "sub" / "private", os.O_CREAT, 0o600))
        assert not place.exists()
    assert names(place) == ["a", "sub"]
    assert (place / "sub" / "private").stat().st_mode == (place / "a").stat().st_mode
    with whole_folder(place) as new:
        (new / "c").write_text("3")
    with pytest.raises(FileNotFoundError), whole_folder(place) as new:
        (new / "no such folder" / "d").write_text("4")
    with pytest.raises(OSError, match="not empty"), whole_folder(place, replace=False) as new:
        (new / "d").write_text("4")
    assert names(place) == ["c"]
    assert names(place.parent) == ["model"]
    remove_whole(place)
    assert names(place.parent) == []


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
    for name in (".tmp-step-000001-abcd", "step-000000", ".hidden", "step-1000000", "step-x"):
        (inner / name).write_text("")
    sweep(tmp_path)
    assert names(inner) == [".hidden", "step-000000", "step-1000000", "step-x"]
    assert steps_in(inner) == [0, 1_000_000]
    sweep(tmp_path / "absent")
    assert steps_in(tmp_path / "absent") == []
