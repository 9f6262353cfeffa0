"""Files of a run that were changed or deleted: named, or written again by a resume."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from team import member, team

import hacrl
from hacrl.errors import UserError
from hacrl.logs.observer import Observer
from hacrl.runs import start
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.pool import Pool
from hacrl.store.reader import RunReader
from hacrl.store.rundir import RunDirectory
from hacrl.study.inspect.summary import summarise
from hacrl.training.repair import damaged_batches, first_step

CONFIG = team(
    member("wren"),
    member("finch"),
    prompts_per_step=3,
    max_response_tokens=12,
    evaluation={"every": 1, "problems": 6},
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    return hacrl.train(CONFIG, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: RunReader, tmp_path: Path) -> RunReader:
    shutil.copytree(whole.path, tmp_path / "run")
    return RunReader(tmp_path / "run")


def drop_last_lines(path: Path, count: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-count]))


def resumed(run: RunReader, match: str) -> RunReader:
    """The run after a resume whose note matches."""
    with pytest.warns(UserWarning, match=match):
        return hacrl.resume(run.path)


# ---------------------------------------------------------------- FAULTS D4


def test_d4_an_edited_reward_in_the_pool_is_named_and_written_again(
    run: RunReader, whole: RunReader
) -> None:
    pool = Pool(run.pool_path)
    (batch,) = (run.pool_path / "step-000001" / "finch").iterdir()
    lines = gzip.decompress(batch.read_bytes())
    batch.write_bytes(gzip.compress(lines.replace(b'"reward":0.0', b'"reward":1.0')))
    with pytest.raises(
        UserError, match=rf"{batch.name}.*`hacrl resume {run.path}` writes it again"
    ):
        pool.snapshot(1)
    resumed(run, "pool: 1 damaged or missing file, the first of step 2")
    assert pool.snapshot(1) == Pool(whole.pool_path).snapshot(1)
    assert run.metric_rows() == whole.metric_rows()


def test_d4_an_edited_snapshot_is_named_and_written_again(run: RunReader) -> None:
    """Without the peer's batch the learner would have had other samples."""
    path = run.pool_path / "step-000001" / "snapshot.json"
    before = path.read_bytes()
    content = json.loads(before)
    del content["batches"]["finch"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"snapshot\.json: .*check value"):
        Pool(run.pool_path).snapshot(1)
    resumed(run, "pool: 1 damaged")
    assert path.read_bytes() == before


def test_a_deleted_pool_is_written_again_from_the_journals(
    run: RunReader, whole: RunReader
) -> None:
    """FAULTS D13-20: no way out was named though the journals hold everything."""
    shutil.rmtree(run.pool_path)
    resumed(run, "pool: 9 damaged or missing files, the first of step 1: written again")
    for step in range(3):
        assert Pool(run.pool_path).snapshot(step) == Pool(whole.pool_path).snapshot(step)


# ---------------------------------------------------------------- FAULTS D8


def test_d8_truncated_metrics_are_named_and_measured_again(
    run: RunReader, whole: RunReader
) -> None:
    """Cut at a line, so that the rest is valid. The newest checkpoint needs the missing rows; an older
    one is used."""
    drop_last_lines(run.metrics_path, 3)
    with pytest.raises(UserError, match=r"metrics\.jsonl: the end is missing.*`hacrl resume"):
        summarise(run)
    resumed(run, r"metrics\.jsonl: the end is missing.*Training continues from step 3")
    assert run.metrics_path.read_bytes() == whole.metrics_path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(path.read_text().replace('"step": 0', '"step": 9', 1)),
        lambda path: path.write_bytes(path.read_bytes()[:50] + b"\xff\0\n"),
    ],
)
def test_d8_damaged_metrics_are_measured_again(
    damage: Callable[[Path], None], run: RunReader, whole: RunReader
) -> None:
    damage(run.metrics_path)
    with pytest.raises(UserError, match=r"metrics\.jsonl.*`hacrl resume"):
        summarise(run)
    resumed(run, r"metrics\.jsonl.*Training continues from step 1;")
    assert run.metrics_path.read_bytes() == whole.metrics_path.read_bytes()


def test_d8_truncated_replies_are_named_by_show(run: RunReader, whole: RunReader) -> None:
    path = run.evaluation(3, "wren") / "replies.jsonl"
    drop_last_lines(path, 2)
    with pytest.raises(UserError, match=rf"{path}: line 1.*delete {run.metrics_path} and run"):
        summarise(run)
    run.metrics_path.unlink()  # the way out
    resumed(run, "metrics.jsonl")
    assert run.scores(3, "wren") == whole.scores(3, "wren")
    path.unlink()
    with pytest.raises(UserError, match=f"{path}: the file is missing"):
        summarise(run)


@pytest.mark.parametrize("name", ["times.jsonl", "notes.jsonl", "counts.json"])
def test_d8_damaged_times_notes_and_counts_are_named(name: str, run: RunReader) -> None:
    """times.jsonl was a traceback. Deleting the file is the way out."""
    path = run.path / name
    path.write_bytes(path.read_bytes()[:-30] + b"\n" if path.exists() else b"[1]\n")
    with pytest.raises(UserError, match=f"{path}: .*[Dd]elete the file to go on"):
        summarise(run)
    path.unlink()
    summarise(run)


def test_d8_a_flipped_best_mark_is_named_and_written_again(
    run: RunReader, whole: RunReader
) -> None:
    path = run.checkpoints("wren") / "best.json"
    path.write_text(path.read_text().replace(": 0.", ": 0.9", 1))
    with pytest.raises(UserError, match=r"best\.json.*hacrl resume"):
        Checkpoints(run.checkpoints("wren"), 2).best()
    resumed(run, r"best\.json")
    found, expected = (Checkpoints(r.checkpoints("wren"), 2).best() for r in (run, whole))
    assert found == expected


def test_d8_an_edited_config_is_shown(run: RunReader) -> None:
    edited = "config.toml was edited after hacrl wrote it"
    assert not any(edited in text for _, text in summarise(run).notes)
    run.config_path.write_text(run.config_path.read_text().replace("steps = 3", "steps = 4"))
    assert edited in summarise(run).notes[-1][1]


# ---------------------------------------------------------------- journals


def test_a_damaged_journal_is_named_and_its_deletion_samples_the_same(
    run: RunReader, whole: RunReader
) -> None:
    """A step after the checkpoint; the same random numbers give the same replies."""
    for name in ("wren", "finch"):
        shutil.rmtree(run.checkpoints(name) / "step-000003")
    path = run.journal("finch") / "step-000002.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-20])
    with pytest.raises(UserError, match=rf"{path}.*delete it and run `hacrl resume RUN`"):
        hacrl.resume(run.path)
    path.unlink()
    hacrl.resume(run.path)
    assert path.read_bytes() == before
    assert run.metrics_path.read_bytes() == whole.metrics_path.read_bytes()


def test_a_journal_of_a_step_before_the_checkpoint_must_be_restored(tmp_path: Path) -> None:
    """Without its own rewards of step 1 the agent, which publishes nothing, had another capability."""
    agents = [member("wren", publish="nothing"), member("finch")]
    settings = {"evaluation": {"problems": 0}, "checkpoint": {"every": 2}, "steps": 2}
    run = hacrl.train(team(*agents, **settings), tmp_path / "run")
    path = run.journal("wren") / "step-000000.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=f"{path}: the content.*or start a new run"):
        hacrl.resume(run.path, steps=3)
    path.unlink()
    with pytest.raises(UserError, match=f"{path}: the file is missing.*or start a new run"):
        hacrl.resume(run.path, steps=3)


# ---------------------------------------------------------------- two kills


@pytest.mark.parametrize("cause", ["checkpoint", "metrics"])
def test_a_checkpoint_after_the_first_step_of_a_resume_does_not_count(
    cause: str, run: RunReader
) -> None:
    """finch had saved step 3 when the run was killed, wren had not. After the resume wren is faster and
    saves it before the second kill. Or metrics of step 3 were damaged. The next resume must not start
    after step 3: its metrics are not written."""
    names, saved = ("wren", "finch"), run.checkpoints("wren") / "step-000003"
    folders = {name: Checkpoints(run.checkpoints(name), 2) for name in names}
    if cause == "checkpoint":
        saved.rename(saved.with_name("kept"))
    else:
        drop_last_lines(run.metrics_path, 3)
    assert first_step(RunDirectory(run.path), folders, lambda text: None) == 2
    aside = run.checkpoints("finch") / "aside-step-000003"
    assert aside.is_dir()
    if cause == "checkpoint":
        saved.with_name("kept").rename(saved)
    assert first_step(RunDirectory(run.path), folders, lambda text: None) == 2
    folders["finch"].prune()
    assert not aside.exists()


def test_a_damaged_batch_after_the_checkpoint_opens_its_step_again(
    run: RunReader, whole: RunReader
) -> None:
    """Agents do not wait in a closed step, so in parallel one would read the batch before the other has
    written it again."""
    for name in ("wren", "finch"):
        shutil.rmtree(run.checkpoints(name) / "step-000003")
    (batch,) = (run.pool_path / "step-000002" / "finch").iterdir()
    batch.write_bytes(b"damaged")
    pool, directory = Pool(run.pool_path), RunDirectory(run.path)
    damaged_batches(run.config(), directory, pool, 2, lambda text: None)
    assert [pool.closed(step) for step in range(3)] == [True, True, False]
    hacrl.resume(run.path)
    assert pool.snapshot(2) == Pool(whole.pool_path).snapshot(2)
    assert run.metrics_path.read_bytes() == whole.metrics_path.read_bytes()


# ---------------------------------------------------------------- deleted during a run


class Deletes(Observer):
    """Deletes a file or folder of the run after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if step == self.step and self.path.exists():
            (shutil.rmtree if self.path.is_dir() else os.remove)(self.path)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("name", ["pool", "metrics.jsonl"])
def test_files_deleted_during_a_run_end_it_with_a_message(
    name: str, step: int, tmp_path: Path
) -> None:
    """FAULTS D13-20: exit 0. A resume then writes them again."""
    path = tmp_path / "run"
    config = {**CONFIG, "evaluation": {"problems": 0}}
    with pytest.raises(UserError, match=rf"{path / name}.*hacrl resume"):
        start(config, path, observer=Deletes(path / name, step))
    hacrl.resume(path)
    assert len(RunReader(path).metric_rows("train")) == 6
    assert len(Pool(path / "pool").snapshot(2).groups) == 3


# ---------------------------------------------------------------- FIRST_HOUR 9

READS = """
import os, sys
from typer.testing import CliRunner
from hacrl.cli import app

def refuse(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        assert not str(args[0]).startswith(sys.argv[1]), args
    if event in ("os.remove", "os.rename", "os.mkdir", "os.link"):
        assert not str(args[0]).startswith(sys.argv[1]), args

sys.addaudithook(refuse)
for command in ("samples", "show"):
    result = CliRunner().invoke(app, [command, sys.argv[1]])
    assert result.exit_code == 0, (result.output, result.exception)
"""


def test_first_hour_9_show_and_samples_read_a_run_without_write_permission(run: RunReader) -> None:
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        command = [sys.executable, "-c", READS, str(run.path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        for path in (run.path, *run.path.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
    assert found.returncode == 0, found.stderr
