"""The pool: atomic batches, one snapshot per step, several processes, files that were changed."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from breaking import in_little_room, kill_everywhere, start
from rows import make_row as row

from hacrl.errors import UserError
from hacrl.store.files import sweep
from hacrl.store.pool import Pool
from hacrl.types import Status, Verdict


@pytest.fixture
def pool(tmp_path):
    return Pool(tmp_path / "pool")


def keys(snapshot):
    return [t.key for group in snapshot.groups for t in group.trajectories]


def test_a_snapshot_is_ordered_whatever_the_order_of_publishing(pool):
    batches = {
        a: [row(a, q, i) for q in ("q2", "Q", "é", "q10") for i in (1, 0)] for a in ("bee", "ant")
    }
    for agent, rows in batches.items():
        random.Random(0).shuffle(rows)
        pool.publish(3, agent, rows)
    assert pool.arrived(3) == ("ant", "bee")
    pool.close(3, ["bee", "ant"])
    snapshot = pool.snapshot(3)
    assert snapshot.step == 3
    assert snapshot.members == pool.members(3) == ("bee", "ant")  # as given
    assert [g.problem_id for g in snapshot.groups] == ["Q", "q10", "q2", "é"]
    assert [g.task for g in snapshot.groups] == ["add"] * 4
    assert keys(snapshot)[:4] == [(3, a, "Q", i) for a in ("ant", "bee") for i in (0, 1)]
    assert sorted(batches["ant"] + batches["bee"], key=lambda t: t.key) == list(pool.rows())


def test_batches_can_be_read_with_zcat(pool):
    """A file is named by the sha256 of its uncompressed lines; its bytes depend on nothing else."""
    rows = [row(index=i, text="a\u2028b\n") for i in range(3)]
    digest = pool.publish(3, "ant", rows)
    path = pool.folder / "step-000003" / "ant" / f"{digest}.jsonl.gz"
    lines = subprocess.run(["zcat", path], capture_output=True, check=True).stdout
    assert hashlib.sha256(lines).hexdigest() == digest
    assert [json.loads(line)["index"] for line in lines.split(b"\n")[:-1]] == [0, 1, 2]
    other = Pool(pool.folder.parent / "other")
    other.publish(3, "ant", rows[::-1])
    assert (other.folder / path.relative_to(pool.folder)).read_bytes() == path.read_bytes()
    pool.close(3, ["ant"])
    assert json.loads((pool.folder / "step-000003" / "snapshot.json").read_text()) == {
        "schema": 1,
        "step": 3,
        "batches": {"ant": digest},
    }


def test_the_same_batch_again_is_harmless_and_another_is_refused(pool):
    rows = [row(index=0), row(index=1)]
    digest = pool.publish(3, "ant", rows)
    assert pool.publish(3, "ant", rows[::-1]) == digest
    other = [rows[0], replace(rows[1], verdict=Verdict(0.0, Status.WRONG))]
    with pytest.raises(
        UserError, match=rf"step-000003/ant already .*'ant'.*{digest}, new: [0-9a-f]"
    ):
        pool.publish(3, "ant", other)
    assert list(pool.rows()) == rows


def test_what_cannot_be_published(pool):
    for rows, error, words in (
        ([row(), row()], ValueError, "twice"),
        ([row("bee")], ValueError, "agent 'bee'"),
        ([row(step=4)], ValueError, "step 4"),
        ([row(), row(index=1, text="\ud800")], UserError, "index 1: cannot.*surrogate"),
        ([replace(row(), mean_logprob=float("nan"))], UserError, "'q1'.*field mean_logprob"),
    ):
        with pytest.raises(error, match=f"agent 'ant', step 3.*{words}"):
            pool.publish(3, "ant", rows)
    assert list(pool.rows()) == [] and pool.arrived(3) == ()


def test_the_first_close_decides_and_late_batches_never_count(pool):
    for agent in ("ant", "bee", "cat"):
        pool.publish(3, agent, [row(agent)])
    assert not pool.closed(3)
    with pytest.raises(UserError, match="step 3 is not closed"):
        pool.snapshot(3)
    pool.close(3, ["ant", "dog", "bee"])
    before = pool.snapshot(3)
    assert before.members == ("ant", "bee")  # dog has not published; cat is not a member
    assert keys(before) == [(3, "ant", "q1", 0), (3, "bee", "q1", 0)]
    pool.publish(3, "dog", [row("dog")])
    pool.close(3, ["ant", "bee", "cat"])
    pool.close(3, ["dog"])
    assert pool.closed(3)
    assert pool.snapshot(3) == before
    assert pool.arrived(3) == ("ant", "bee", "cat", "dog")
    assert len(list(pool.rows(step=3))) == 4


def test_a_step_without_batches_cannot_be_closed(pool):
    for members in ([], ["ant"]):
        with pytest.raises(ValueError, match="step 4"):
            pool.close(4, members)
    assert not pool.closed(4)


def test_an_empty_batch_is_an_arrival(pool):
    pool.publish(0, "ant", [])
    assert pool.arrived(0) == ("ant",)
    pool.close(0, ["ant"])
    assert pool.members(0) == ("ant",)
    assert pool.snapshot(0).groups == ()


def test_steps_do_not_mix(pool):
    for step, agent in ((1, "ant"), (2, "ant"), (2, "bee"), (1_000_000, "ant")):
        pool.publish(step, agent, [row(agent, step=step)])
    pool.close(2, ["ant", "bee"])
    assert not pool.closed(1)
    assert keys(pool.snapshot(2)) == [(2, "ant", "q1", 0), (2, "bee", "q1", 0)]
    assert [t.step for t in pool.rows(agent="ant")] == [1, 2, 1_000_000]
    assert [t.key for t in pool.rows(agent="bee", step=2)] == [(2, "bee", "q1", 0)]
    assert list(pool.rows(step=7)) == []


def test_a_reader_writes_nothing(pool, tmp_path):
    pool.publish(3, "ant", [row()])
    pool.close(3, ["ant"])
    reader = Pool(pool.folder, read_only=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert reader.snapshot(3) == pool.snapshot(3)
    assert list(reader.rows()) and reader.closed(3) and not reader.closed(4)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    for write in (lambda: reader.publish(4, "ant", []), lambda: reader.close(3, ["ant"])):
        with pytest.raises(AssertionError, match="read-only"):
            write()
    with pytest.raises(UserError, match="does not exist"):
        Pool(tmp_path / "gone", read_only=True)
    assert not (tmp_path / "gone").exists()


# ---------------------------------------------------------------- files that were changed


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("not a complete gzip file", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("not a complete gzip file", lambda path: path.write_bytes(b"text")),
        ("sha256", lambda path: path.write_bytes(gzip.compress(b"{}\n"))),
        ("missing|must hold one file", lambda path: path.unlink()),
        ("missing|must hold one file", lambda path: path.rename(path.with_name("other"))),
    ],
)
def test_a_changed_batch_is_noticed(pool, words, change):
    pool.publish(3, "ant", [row()])
    pool.publish(3, "bee", [row("bee")])
    pool.close(3, ["ant", "bee"])
    (path,) = (pool.folder / "step-000003" / "bee").iterdir()
    change(path)
    for read in (lambda: pool.snapshot(3), lambda: list(pool.rows())):
        with pytest.raises(UserError, match=words) as error:
            read()
        assert str(path.parent) in str(error.value)
        assert "Restore the file" in str(error.value)
    assert list(pool.rows("ant")) == [row()]


def test_every_changed_byte_is_noticed(pool):
    """Also in the gzip header and trailer, unless the lines are the same."""
    pool.publish(3, "ant", [row()])
    pool.close(3, ["ant"])
    before = pool.snapshot(3)
    (path,) = (pool.folder / "step-000003" / "ant").iterdir()
    data = path.read_bytes()
    noticed = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert pool.snapshot(3) == before
        except UserError:
            noticed += 1
    assert noticed > len(data) - 10  # time, operating system and flags of the gzip header are free


def test_a_batch_from_elsewhere_is_refused(pool):
    """Its digest is right, its agent is not."""
    pool.publish(3, "ant", [row()])
    pool.close(3, ["ant"])
    record = pool.folder / "step-000003" / "snapshot.json"
    os.rename(pool.folder / "step-000003" / "ant", pool.folder / "step-000003" / "bee")
    record.write_text(record.read_text().replace('"ant"', '"bee"'))
    with pytest.raises(UserError, match=r"row of step 3 and agent 'ant'"):
        pool.snapshot(3)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("Invalid JSON", "{"),
        ("batches", '{"schema": 1, "step": 3}'),
        ("step", '{"schema": 1, "step": 2, "batches": {}}'),
        ("batches.ant", '{"schema": 1, "step": 3, "batches": {"ant": 1}}'),
        ("schema", '{"schema": 2, "step": 3, "batches": {}}'),
    ],
)
def test_a_changed_snapshot_record_is_noticed(pool, field, text):
    pool.publish(3, "ant", [row()])
    pool.close(3, ["ant"])
    path = pool.folder / "step-000003" / "snapshot.json"
    path.write_text(text)
    for read in (pool.snapshot, pool.members):
        with pytest.raises(UserError, match=field) as error:
            read(3)
        assert str(path) in str(error.value)


# ---------------------------------------------------------------- several processes, kills, full disks

HEAD = """
import hashlib, sys, time
from pathlib import Path
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.types import *

def rows(agent, step, text="x" * 500):
    return [
        Trajectory(f"q{q}", "add", agent, i, step, 0, (Turn("assistant", text, True),),
                   Finish.STOP, -0.5, 3, Verdict(1.0, Status.OK), "v/1", Sampling(1.0, 8), True)
        for q in range(10) for i in range(4)
    ]
"""
WRITER = """
folder, agent, other = sys.argv[1:]
pool = Pool(Path(folder))
for step in range(12):
    pool.publish(step, agent, rows(agent, step))
    pool.publish(step, "both", rows("both", step))    # the other process publishes the same
    try:
        pool.publish(step, "disputed", rows("disputed", step, agent))
        won = True
    except UserError:
        won = False
    if step % 3 == 0:                # wait for the other, then race; otherwise just race
        until = time.monotonic() + 300
        while len(pool.arrived(step)) < 4:
            assert time.monotonic() < until, f"{other} never arrived"
    pool.close(step, [agent, other, "both", "disputed"][:: 1 if agent == "ant" else -1])
    print(step, hashlib.sha256(repr(pool.snapshot(step)).encode()).hexdigest(), won, flush=True)
"""


def test_two_processes_race(tmp_path):
    """Both publish the batch of "both", different ones of "disputed", and both close every step: all
    see one snapshot per step, one of the disputed batches wins, and nothing is lost."""
    names = (("ant", "bee"), ("bee", "ant"))
    processes = [start(HEAD + WRITER, tmp_path, *pair) for pair in names]
    (one, error_one), (two, error_two) = [p.communicate(timeout=600) for p in processes]
    assert (error_one, error_two) == ("", "")
    pool = Pool(tmp_path)
    for step, (mine, theirs) in enumerate(zip(one.split("\n"), two.split("\n"), strict=True)):
        if not mine:
            break
        snapshot = pool.snapshot(step)
        digest = hashlib.sha256(repr(snapshot).encode()).hexdigest()
        assert mine.split()[:2] == theirs.split()[:2] == [str(step), digest]
        assert sorted((mine.split()[2], theirs.split()[2])) == ["False", "True"]
        assert pool.arrived(step) == ("ant", "bee", "both", "disputed")
        assert len(list(pool.rows(step=step))) == 160
        counted = sum(len(group.trajectories) for group in snapshot.groups)
        assert counted == 40 * len(snapshot.members) and "both" in snapshot.members
        if step % 3 == 0:
            assert counted == 160
    assert step == 12


def test_threads_race(pool):
    snapshots = []

    def work(number):
        agent = f"a{number // 2}"
        pool.publish(3, agent, [row(agent, f"q{i}") for i in range(20)])
        if len(pool.arrived(3)) == 4:
            pool.close(3, [f"a{i}" for i in range(4)][:: 1 if number % 2 else -1])
            snapshots.append(pool.snapshot(3))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert snapshots
    assert all(snapshot == snapshots[0] for snapshot in snapshots)
    assert len(keys(snapshots[0])) == 80


JOB = """
pool = Pool(folder)
pool.publish(1, "bee", rows("bee", 1))
pool.close(1, ["ant", "bee"])
"""


def test_killed_after_every_file_operation(tmp_path):
    """The batch and the snapshot are whole or absent, never half there; repeating the work completes
    it, and sweep() removes what the kill left behind."""
    base = tmp_path / "base"
    Pool(base).publish(1, "ant", [row(step=1)])
    left = kill_everywhere(base, tmp_path / "copies", HEAD, JOB.strip())
    seen = []
    for folder in left:
        pool = Pool(folder)
        arrived, closed = pool.arrived(1), pool.closed(1)
        assert arrived in (("ant",), ("ant", "bee"))
        assert len(list(pool.rows())) == (41 if "bee" in arrived else 1)
        assert not closed or pool.members(1) == ("ant", "bee")
        seen.append((len(arrived), closed))
        sweep(folder)
        assert not list(folder.rglob(".*"))
        pool.publish(1, "bee", list(Pool(left[-1]).rows("bee")))
        pool.close(1, ["ant", "bee"])
        assert len(keys(pool.snapshot(1))) == 41
    assert seen == sorted(seen)
    assert set(seen) == {(1, False), (2, False), (2, True)}


def test_a_closed_step_outlives_the_process(tmp_path):
    """kill -9 right after close() returns."""
    job = "pool = Pool(Path(sys.argv[1])); pool.publish(5, 'ant', []); pool.close(5, ['ant'])\n"
    process = start(HEAD + job + "print('closed', flush=True); time.sleep(600)", tmp_path)
    assert process.stdout.readline() == "closed\n"
    process.kill()
    process.communicate()
    assert Pool(tmp_path, read_only=True).snapshot(5).members == ("ant",)


FULL = """
import random
pool = Pool(Path(sys.argv[1]))
noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=4000))
try:
    pool.publish(4, "ant", rows("ant", 4, noise))
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_nothing(tmp_path):
    pool = Pool(tmp_path)
    pool.publish(3, "ant", [row()])
    said = in_little_room(1000, HEAD + FULL, tmp_path)
    assert said.startswith(str(Path(tmp_path, "step-000004", "ant")))
    assert "MB free" in said and "hacrl resume RUN" in said
    assert pool.arrived(4) == () and list(pool.rows()) == [row()]
    assert not list(tmp_path.rglob(".*"))
