"""Checkpoints are whole, verified, and never the last one to go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from breaking import in_little_room, kill_everywhere, names

import hacrl.store.checkpoint
from hacrl.errors import UserError
from hacrl.store.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, newest_common

SRC = Path(hacrl.store.checkpoint.__file__).parents[2]


def snapshot(step, value=None):
    value = float(step) if value is None else value
    return Checkpoint(
        step=step,
        model={"w": torch.full((3, 4), value), "b": torch.tensor([value], dtype=torch.bfloat16)},
        optimizer={"w.exp_avg": torch.full((3, 4), value / 7), "w.step": torch.tensor(value)},
        state={"updates": 3 * step, "score": 0.1 + 0.2, "name": "é", "list": [1, None, True]},
    )


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "ant", keep=2)


def spoil(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_loaded_is_what_was_saved(store):
    saved = snapshot(10)
    place = store.save(saved)
    assert place == store.folder / "step-000010"
    assert names(place) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    loaded = store.load(10)
    assert (loaded.step, loaded.state, loaded.pool_position) == (10, saved.state, 10)
    for part in ("model", "optimizer"):
        old, new = getattr(saved, part), getattr(loaded, part)
        assert set(old) == set(new)
        for name in old:
            assert old[name].dtype == new[name].dtype
            assert torch.equal(old[name], new[name])
    assert "torch" not in (place / "manifest.json").read_text()


def test_views_gradients_and_nothing_at_all_can_be_saved(store):
    buffer = torch.arange(6.0)
    store.save(
        Checkpoint(
            0,
            {"t": torch.arange(6.0).view(2, 3).t(), "p": torch.nn.Parameter(torch.ones(2))},
            {"left": buffer[:3], "right": buffer[3:]},  # parts of one buffer that do not meet
            {},
            pool_position=4,
        )
    )
    loaded = store.load(0)
    assert loaded.model["t"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert loaded.optimizer["right"].tolist() == [3.0, 4.0, 5.0]
    assert loaded.pool_position == 4
    store.save(Checkpoint(1, {}, {}, {}))
    assert store.load(1).model == {}


def test_tied_tensors_are_refused_by_name(store):
    tied = torch.ones(4, 4)
    for twin in (tied, tied.t(), tied[2]):
        with pytest.raises(ValueError, match="'a' and 'b' share memory"):
            store.save(Checkpoint(1, {"a": tied, "b": twin}, {}, {}))
    assert store.steps() == []


@pytest.mark.parametrize(
    "state", [{"a": float("nan")}, {"a": (1, 2)}, {1: "a"}, {"a": torch.ones(1)}, {"a": {1, 2}}]
)
def test_state_must_be_plain_json(store, state):
    with pytest.raises(ValueError, match="step 1 is not plain JSON"):
        store.save(Checkpoint(1, {}, {}, state))
    assert store.steps() == []


def test_the_newest_and_the_best_are_kept(store):
    for step, score in ((10, 0.3), (20, 0.9), (30, 0.9), (40, 0.1), (50, 0.2)):
        improved = store.mark_best(step, score)  # before the step is saved, as a run does it
        assert improved == (step in (10, 20))  # an equal score is no better
        store.save(snapshot(step))
        store.prune()
    assert store.steps() == [20, 40, 50]
    assert store.best() == (20, 0.9)
    assert json.loads((store.folder / "best.json").read_text())["scores"] == {"20": 0.9}
    with pytest.raises(ValueError, match="finite"):
        store.mark_best(60, float("nan"))
    with pytest.raises(UserError, match="keep = 0"):
        Checkpoints(store.folder, keep=0)


def test_the_old_best_stays_until_the_new_one_is_saved(store):
    """Killed between the mark and the save: the old one is still the best, and going through the
    step again marks and saves it as if nothing had happened."""
    store.mark_best(10, 0.3)
    store.save(snapshot(10))
    assert store.mark_best(20, 0.5)
    again = Checkpoints(store.folder, keep=1)
    assert again.best() == (10, 0.3)
    again.save(snapshot(15))
    again.prune()
    assert again.steps() == [10, 15]
    assert again.mark_best(20, 0.5)
    again.save(snapshot(20))
    again.prune()
    assert again.best() == (20, 0.5)
    assert again.steps() == [20]
    assert again.mark_best(30, 0.9)
    assert again.mark_best(40, 0.6)  # 30 never came to be: what is to be beaten is 20


def test_what_a_left_run_saved_later_does_not_count(tmp_path):
    """Ant had saved step 30 when the run was killed, bee not: both go on from 20. When they save
    25, ant's old 30 must not take the place of its 25, or no step would be common to both."""
    team = {name: Checkpoints(tmp_path / name, keep=1) for name in ("ant", "bee")}
    for store in team.values():
        store.save(snapshot(20))
    team["ant"].mark_best(30, 0.9)
    team["ant"].save(snapshot(30))

    team = {name: Checkpoints(tmp_path / name, keep=1) for name in team}
    assert newest_common(team, pytest.fail) == 20
    assert team["ant"].mark_best(25, 0.1)  # better than nothing: 30 was another run's
    for store in team.values():
        store.save(snapshot(25))
    assert newest_common(team, pytest.fail) == 25
    for store in team.values():
        store.prune()
    assert [store.steps() for store in team.values()] == [[25], [25]]
    assert team["ant"].best() == (25, 0.1)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["spoiled", "cut", "gone"])
def test_a_corrupted_checkpoint_falls_back_and_says_so(store, name, how):
    for step in (10, 20):
        store.save(snapshot(step))
    path = store.path(20) / name
    if how == "spoiled":
        spoil(path)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    with pytest.raises(CorruptCheckpoint, match=name):
        store.load(20)
    said = []
    assert store.newest_whole(said.append) == 10
    assert len(said) == 1
    assert "step 20 is corrupted" in said[0]
    assert name in said[0]
    assert said[0].endswith("using step 10 instead")
    spoil(store.path(10) / "state.json")
    assert store.newest_whole(said.append) is None
    assert said[1].endswith("no older one is left")


def test_a_manifest_cannot_name_other_files(store):
    store.save(snapshot(10))
    path = store.path(10) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../secret"] = {"size": 0, "sha256": ""}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpoint, match="lists other files"):
        store.load(10)


def test_a_pickle_in_place_of_tensors_is_not_run(store, tmp_path):
    """Even when the manifest was made to agree with it."""
    store.save(snapshot(10))
    place = store.path(10)
    torch.save({"w": torch.ones(1)}, place / "model.safetensors")
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = hacrl.store.checkpoint._facts(
        place / "model.safetensors"
    )
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors is not safetensors"):
        store.load(10)


def test_the_newest_common_step(tmp_path):
    team = {name: Checkpoints(tmp_path / name, keep=5) for name in ("ant", "bee", "cat")}
    said = []
    assert newest_common(team, said.append) is None
    assert newest_common({}, said.append) is None
    for name, steps in (("ant", (10, 20, 30)), ("bee", (10, 20, 30, 40)), ("cat", (10, 20, 30))):
        for step in steps:
            team[name].save(snapshot(step))
    assert newest_common(team, said.append) == 30
    assert said == []
    spoil(team["cat"].path(30) / "model.safetensors")
    assert newest_common(team, said.append) == 20
    assert len(said) == 1
    assert "cat" in said[0]
    assert "using step 20 instead" in said[0]


JOB = """
store = Checkpoints(folder, keep=1)
store.mark_best(20, 0.5)
store.save(Checkpoint(20, {'w': torch.full((2,), 20.0)}, {}, {}))
store.save(Checkpoint(20, {'w': torch.full((2,), 21.0)}, {}, {}))
store.prune()
"""


def test_killed_at_every_file_operation(tmp_path):
    """Best marked, step 20 saved, saved again with other content (a resumed run), 10 pruned. After
    a kill anywhere a resumed run finds 10 or 20, whole, and nothing lies about."""
    base = tmp_path / "base"
    Checkpoints(base, keep=1).save(Checkpoint(10, {"w": torch.full((2,), 10.0)}, {}, {}))
    left = kill_everywhere(
        base,
        tmp_path / "copies",
        "import torch\nfrom hacrl.store.checkpoint import Checkpoints, Checkpoint",
        JOB.strip(),
    )
    assert len(left) > 20
    seen = []
    for folder in left:
        store = Checkpoints(folder, keep=1)
        step = newest_common({"ant": store}, pytest.fail)
        value = store.load(step).model["w"][0].item()
        assert (step, value) in ((10, 10.0), (20, 20.0), (20, 21.0))
        seen.append(value)
        assert set(names(folder)) <= {"best.json", "step-000010", "step-000020"}
    assert seen == sorted(seen)
    assert set(seen) == {10.0, 20.0, 21.0}
    assert names(left[-1]) == ["best.json", "step-000020"]


SLOW = """
import sys, torch
from pathlib import Path
from hacrl.store.checkpoint import Checkpoints, Checkpoint
from hacrl.store.files import remove_whole
store = Checkpoints(Path(sys.argv[1]), keep=1)
big = torch.zeros(16_000_000)
while True:
    remove_whole(store.save(Checkpoint(2, {'w': big}, {}, {})))
"""


def stopped(process: subprocess.Popen) -> bool:
    process.send_signal(signal.SIGSTOP)
    return os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


def test_killed_in_the_middle_of_the_tensors(tmp_path):
    """The kill comes while 64 MB of weights are being written. They are written again and again, and
    the process is stopped to see whether it is just there: looking takes time as well."""

    def half_written() -> bool:
        try:
            found = [names(folder) for folder in tmp_path.glob(".tmp-*")]
        except FileNotFoundError:  # finished, or removed, just now
            return False
        return any(content and "optimizer.safetensors" not in content for content in found)

    store = Checkpoints(tmp_path, keep=1)
    store.save(snapshot(1))
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    until = time.monotonic() + 300
    while not (half_written() and stopped(process) and half_written()):
        assert process.poll() is None and time.monotonic() < until
        process.send_signal(signal.SIGCONT)
        time.sleep(0.0005)
    process.kill()
    assert process.wait() == -9
    assert list(tmp_path.glob(".tmp-*"))
    assert store.steps() == [1]
    again = Checkpoints(tmp_path, keep=1)
    assert newest_common({"ant": again}, pytest.fail) == 1
    assert names(tmp_path) == ["step-000001"]
    assert torch.equal(again.load(1).model["w"], snapshot(1).model["w"])


FULL = """
import sys, torch
from pathlib import Path
from hacrl.store.checkpoint import Checkpoints, Checkpoint
from hacrl.errors import UserError
store = Checkpoints(Path(sys.argv[1]), keep=1)
try:
    store.save(Checkpoint(2, {'w': torch.zeros(100_000)}, {}, {}))
except UserError as error:
    print(error)
"""


def test_a_full_disk_says_so_and_leaves_the_old_state(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    store.save(snapshot(1))
    said = in_little_room(100_000, FULL, tmp_path)
    assert said.startswith(str(tmp_path / "step-000002"))
    assert "MB free" in said
    assert "free space, then `hacrl resume RUN`" in said
    assert names(tmp_path) == ["step-000001"]
    assert store.newest_whole(pytest.fail) == 1


def test_a_really_full_disk(tmp_path):
    """The same on a file system of 256 KB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount here")
    try:
        store = Checkpoints(disk / "ant", keep=1)
        store.save(snapshot(1))
        big = Checkpoint(2, {"w": torch.zeros(100_000)}, {}, {})
        with pytest.raises(UserError, match=r"step-000002.*No space left.*hacrl resume RUN"):
            store.save(big)
        assert names(disk / "ant") == ["step-000001"]
        assert store.load(1).state == snapshot(1).state
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_changed_best_file_is_named(store):
    store.save(snapshot(10))
    for text in ("{", "[]", '{"scores": {"10": "high"}}', '{"scores": {"../x": 1.0}}'):
        (store.folder / "best.json").write_text(text)
        with pytest.raises(CorruptCheckpoint, match=r"best\.json"):
            store.best()
