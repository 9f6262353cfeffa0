"""Run directories: the reader on hand-written files, one writer, a layout of this version."""

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from hacrl.config import parse_config
from hacrl.errors import UserError
from hacrl.store.reader import RunReader
from hacrl.store.rows import RowLog, seal, write_rows
from hacrl.store.rundir import RunDirectory


def write_lines(path: Path, *rows: dict[str, Any]) -> None:
    """Write a file that grows."""
    RowLog(path, "").replace(rows)


CONFIG: dict[str, Any] = {
    "steps": 2,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number"},
    "agents": [
        {"name": "a", "model": "pocket:wren"},
        {"name": "frozen", "model": "pocket:finch", "learn": False},
    ],
}


def make_run(path: Path, problems: int = 4) -> RunDirectory:
    config = parse_config({**CONFIG, "evaluation": {"problems": problems}})
    return RunDirectory.create(path, config)


def test_a_row_measured_twice_counts_once(tmp_path: Path) -> None:
    """Metrics: the last row. Times: the longest of each phase, since a resumed step takes its
    rollouts from the journal."""
    run = make_run(tmp_path / "run")
    base = {"kind": "train", "agent": "a"}
    write_lines(
        run.metrics_path,
        {**base, "step": 0, "reward": 0.1},
        {**base, "step": 1, "reward": 0.2},
        {**base, "step": 1, "reward": 0.3},
        {**base, "kind": "evaluation", "step": 1, "reward": 0.9},
    )
    write_lines(
        run.path / "times.jsonl",
        {"step": 0, "agent": "a", "sample": 1.0, "update": 2.0},
        {"step": 1, "agent": "a", "sample": 4.0, "update": 2.0, "checkpoint": 50.0},
        {"step": 1, "agent": "a", "sample": 0.5, "update": 3.0, "diagnostics": 8.0},
        {"step": 1, "agent": "", "evaluate": 100.0},
    )
    assert [row["reward"] for row in run.metric_rows("train", "a")] == [0.1, 0.3]
    assert len(run.metric_rows()) == 3 and run.metric_rows("train", "frozen") == []
    assert run.training_seconds() == {0: 3.0, 1: 7.0}
    assert (run.seconds("a"), run.seconds("a", diagnostics=True)) == (10.0, 8.0)
    assert run.steps_done() == 2


def test_state(tmp_path: Path) -> None:
    """A run is finished with the last evaluation of its learners; without evaluations, with their
    last training row."""
    run = make_run(tmp_path / "run")
    assert (run.steps_done(), run.finished(), run.running()) == (0, False, False)
    train = [{"kind": "train", "step": i, "agent": "a"} for i in range(2)]
    write_lines(run.metrics_path, *train)
    assert not run.finished()
    write_lines(run.metrics_path, *train, {"kind": "evaluation", "step": 2, "agent": "a"})
    assert run.finished()
    with run.locked():
        assert RunReader(run.path).running()
    assert not run.running()
    without = make_run(tmp_path / "without", problems=0)
    write_lines(without.metrics_path, *train)
    assert without.finished()


def test_scores_are_recounted_from_replies(tmp_path: Path) -> None:
    """p: the mean of 1 and 0; q: its unjudged reply is left out; r: nothing judged."""
    rewards = [("p", 1.0), ("p", 0.0), ("q", None), ("q", 1.0), ("r", None)]
    run = RunReader(tmp_path)
    rows = [{"problem": p, "reward": reward} for p, reward in rewards]
    write_rows(run.evaluation(2, "a") / "replies.jsonl", rows)
    assert run.scores(2, "a") == {"p": 0.5, "q": 1.0}
    with pytest.raises(UserError, match=r"replies\.jsonl: the file is missing.*hacrl resume"):
        run.scores(0, "a")


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory: it has no"):
        RunReader.open(tmp_path)


def test_other_layouts_are_refused_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert RunDirectory.open(run.path).config() == run.config()
    path = run.path / "environment.json"
    for text in (seal({"layout": 9}), '{"layout": 9}\n'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"layout 9.*reads layout 3"):
            RunDirectory.open(run.path)
    for key in ("check", "chebk"):  # a wrong check value, a damaged key
        path.write_text(f'{{"layout": 3, "{key}": "0123456789ab"}}\n')
        with pytest.raises(UserError, match=r"environment\.json.*check value.*copy it from a run"):
            RunDirectory.open(run.path)
    path.write_text('{"torch": "2"}\n')  # hacrl 0.1
    with pytest.raises(UserError, match=r"written by hacrl 0\.1\.x.*commit 177e5d4"):
        RunDirectory.open(run.path)


def test_a_directory_in_use_is_not_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already"):
        make_run(run.path)
    (run.path / ".tmp-left-behind").write_text("")
    with run.locked():
        assert not (run.path / ".tmp-left-behind").exists()
        with pytest.raises(UserError, match="another process"), run.locked():
            pass


@contextmanager
def repeated(code: str, path: Path) -> Iterator[None]:
    """Meanwhile another process runs the code on the run `run` again and again."""
    begun = path.parent / "begun"
    program = f"""
from pathlib import Path
from hacrl.store.rundir import RunDirectory
run = RunDirectory(Path({str(path)!r}))
Path({str(begun)!r}).touch()
while True:
    {code}
"""
    with subprocess.Popen([sys.executable, "-c", program]) as other:
        try:
            while not begun.exists():
                assert other.poll() is None
                time.sleep(0.01)
            yield
            assert other.poll() is None
        finally:
            other.kill()


def test_who_looks_at_a_run_does_not_keep_others_from_it(tmp_path: Path) -> None:
    """`hacrl view` asks whether a run is running, and shares its lock for that moment."""
    run = make_run(tmp_path / "run")
    with open(run.path / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        release = Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        release.start()
        with run.locked():
            assert RunReader(run.path).running()
        release.join()


def test_a_directory_that_another_process_takes_at_the_same_time(tmp_path: Path) -> None:
    """The other one has its lock and has written nothing yet."""
    path = tmp_path / "run"
    path.mkdir()
    with RunDirectory(path).locked(), pytest.raises(UserError, match="another process is working"):
        make_run(path)
    assert [file.name for file in path.iterdir()] == [".lock"]
    assert make_run(path).config_path.is_file()


def test_a_run_is_read_while_a_resume_removes_its_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.add_metrics([{"kind": "train", "step": 0, "agent": "a"}])
    with repeated("run.rewind(1)", run.path):
        end = time.monotonic() + 2
        while time.monotonic() < end:
            assert len(RunReader(run.path).metric_rows()) == 1


def test_rewinding_keeps_what_was_measured_before(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in range(3):
        run.add_metrics([{"kind": "evaluation", "step": step, "agent": "a", "x": float("nan")}])
        run.add_metrics([{"kind": "train", "step": step, "agent": "a"}])
    run.rewind(1)
    kept = [(row["kind"], row["step"]) for row in run.metric_rows()]
    assert kept == [("evaluation", 0), ("train", 0), ("evaluation", 1)]
    assert run.metric_rows()[0]["x"] is None
    run.rewind(0)
    assert run.metric_rows() == []


def test_a_note_is_kept_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for done, text in ((0, "3 prompts are too long"), (4, "no signal"), (5, "no signal")):
        run.add_note(done, text)
    assert run.notes() == [
        {"step": 0, "text": "3 prompts are too long"},
        {"step": 4, "text": "no signal"},
    ]
