"""Checkpoints are complete, verified, and never the last one to go."""

import os

import pytest
import torch
from breaking import kill_everywhere, names

from hacrl.errors import UserError
from hacrl.store.checkpoint import Checkpoint, Checkpoints, CorruptCheckpoint, newest_common
from hacrl.store.files import remove_whole, sweep
from hacrl.store.rows import read_object


def checkpoint(step):
    return Checkpoint(
        step=step,
        model={"w": torch.full((3, 4), step), "b": torch.tensor([step], dtype=torch.bfloat16)},
        optimizer={"w.exp_avg": torch.full((3, 4), step / 7), "w.step": torch.tensor(float(step))},
        state={"updates": 3 * step, "score": 0.1 + 0.2, "name": "é", "list": [1, None, True]},
    )


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "ant", keep=2)


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_loaded_is_what_was_saved(store):
    saved = checkpoint(10)
    place = store.save(saved)
    assert place == store.folder / "step-000010"
    files = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(place) == files
    assert len({(place / name).stat().st_mode for name in files}) == 1  # all as the umask says
    loaded = store.load(10)
    assert (loaded.step, loaded.state) == (10, saved.state)
    for part in ("model", "optimizer"):
        old, new = getattr(saved, part), getattr(loaded, part)
        assert set(old) == set(new)
        for name in old:
            assert old[name].dtype == new[name].dtype
            assert torch.equal(old[name], new[name])


def test_tied_tensors_and_states_that_are_not_json_are_refused(store):
    tied = torch.ones(4, 4)
    for twin in (tied, tied[2]):
        with pytest.raises(RuntimeError, match="share memory"):
            store.save(Checkpoint(1, {"a": tied, "b": twin}, {}, {}))
    for state in ({"a": float("nan")}, {"a": torch.ones(1)}, {"a": {1, 2}}):
        with pytest.raises((TypeError, ValueError), match="JSON"):
            store.save(Checkpoint(1, {}, {}, state))
    assert store.steps() == []


def test_the_newest_and_the_best_are_kept(store):
    for step, score in ((10, 0.3), (20, 0.9), (30, 0.9), (40, 0.1), (50, 0.2)):
        improved = store.mark_best(step, score)  # before the step is saved, as a run does it
        assert improved == (step in (10, 20))  # an equal score is no better
        store.save(checkpoint(step))
        store.prune()
    assert store.steps() == [20, 40, 50]
    assert store.best() == (20, 0.9)
    assert read_object(store.folder / "best.json", "") == {"20": 0.9}
    store.prune(also=[40])
    Checkpoints(store.folder, keep=1).prune(also=[40])
    assert store.steps() == [20, 40, 50]


def test_the_start_counts_as_a_candidate_for_the_best(store):
    """FIRST_HOUR 13: no checkpoint is the best while none beats the model before training."""
    assert store.mark_best(0, 0.5)
    assert not store.mark_best(10, float("nan"))
    assert not store.mark_best(10, 0.4)
    store.save(checkpoint(10))
    store.prune()
    assert store.best() == (0, 0.5)
    assert store.mark_best(20, 0.6)
    assert store.best() == (0, 0.5)  # until 20 is saved
    store.save(checkpoint(20))
    store.prune()
    assert store.best() == (20, 0.6)
    assert not store.mark_best(15, 0.45)  # resumed from step 10: the start is still the best
    assert store.best() == (0, 0.5)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["damaged", "truncated", "gone"])
def test_a_corrupted_checkpoint_is_passed_over_and_reported(store, name, how):
    for step in (10, 20):
        store.save(checkpoint(step))
    path = store.path(20) / name
    if how == "damaged":
        damage(path)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    with pytest.raises(CorruptCheckpoint, match=name):
        store.load(20)
    os.rename(store.save(checkpoint(40)), store.path(50))
    with pytest.raises(CorruptCheckpoint, match="another step"):
        store.load(50)
    remove_whole(store.path(50))
    said = []
    assert store.newest_whole(said.append) == 10
    assert len(said) == 1
    assert "step 20 is corrupted" in said[0] and name in said[0]
    assert said[0].endswith("using step 10 instead")
    assert store.newest_whole(said.append, among=[20]) is None
    assert said[1].endswith("no older one is left")


def test_the_newest_common_step(tmp_path):
    team = {name: Checkpoints(tmp_path / name, keep=5) for name in ("ant", "bee", "cat")}
    said = []
    assert newest_common(team, said.append) is None
    assert newest_common({}, said.append) is None
    for name, steps in (("ant", (10, 20, 30)), ("bee", (10, 20, 30, 40)), ("cat", (10, 20, 30))):
        for step in steps:
            team[name].save(checkpoint(step))
    assert newest_common(team, said.append) == 30
    assert said == []
    damage(team["cat"].path(30) / "model.safetensors")
    assert newest_common(team, said.append) == 20
    assert len(said) == 1
    assert "cat" in said[0] and "using step 20 instead" in said[0]


def test_a_damaged_best_file_is_named(store):
    store.save(checkpoint(10))
    for text in ("{", "[]", '{"10": "high"}', '{"../x": 1.0}'):
        (store.folder / "best.json").write_text(text)
        with pytest.raises(UserError, match=r"best\.json"):
            store.best()
    store.repair_best({10: 0.5, 20: 0.9})
    assert store.best() == (10, 0.5)  # 20 is not saved


IMPORTS = "import torch\nfrom hacrl.store.checkpoint import Checkpoints, Checkpoint\n"
JOB = """
store = Checkpoints(folder, keep=1)
store.mark_best(20, 0.5)
store.save(Checkpoint(20, {'w': torch.full((2,), 20.0)}, {}, {}))
store.save(Checkpoint(20, {'w': torch.full((2,), 21.0)}, {}, {}))
store.prune()
"""


def test_killed_at_every_file_operation(tmp_path):
    """Best marked, step 20 saved, saved again with other content (a resumed run), 10 pruned. After
    a kill anywhere a resumed run finds 10 or 20, complete, and nothing else."""
    base = tmp_path / "base"
    Checkpoints(base, keep=1).save(Checkpoint(10, {"w": torch.full((2,), 10.0)}, {}, {}))
    left = kill_everywhere(base, tmp_path / "copies", IMPORTS, JOB.strip())
    assert len(left) > 20
    seen = []
    for folder in left:
        sweep(folder)
        store = Checkpoints(folder, keep=1)
        step = newest_common({"ant": store}, pytest.fail)
        seen.append((step, store.load(step).model["w"][0].item()))
        assert set(names(folder)) <= {"best.json", "step-000010", "step-000020"}
    assert seen == sorted(seen)
    assert set(seen) == {(10, 10.0), (20, 20.0), (20, 21.0)}
    assert names(left[-1]) == ["best.json", "step-000020"]
