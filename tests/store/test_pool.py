"""The pool: atomic batches, one snapshot per step, several processes, files that were changed."""

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
from dataclasses import replace

import pytest
from breaking import kill_everywhere, start
from rows import make_row as row

from hacrl.errors import UserError
from hacrl.store.files import sweep
from hacrl.store.pool import Pool
from hacrl.store.rows import seal, unseal
from hacrl.types import Status, Verdict


@pytest.fixture
def pool(tmp_path):
    return Pool(tmp_path / "pool")


def keys(snapshot):
    return [t.key for group in snapshot.groups for t in group.trajectories]


def test_a_snapshot_is_ordered_whatever_the_order_of_publishing(pool):
    rows = [row(a, q, i) for a in ("bee", "ant") for q in ("q2", "Q", "é", "q10") for i in (1, 0)]
    random.Random(0).shuffle(rows)
    for agent in ("bee", "ant"):
        pool.publish(3, agent, [t for t in rows if t.agent == agent])
    assert pool.arrived(3) == ("ant", "bee")
    pool.close(3, ["bee", "ant"])
    snapshot = pool.snapshot(3)
    assert snapshot.step == 3
    assert snapshot.members == pool.members(3) == ("bee", "ant")  # as given
    assert [(g.problem_id, g.task) for g in snapshot.groups] == [
        (q, "add") for q in ("Q", "q10", "q2", "é")
    ]
    assert keys(snapshot)[:4] == [(3, a, "Q", i) for a in ("ant", "bee") for i in (0, 1)]
    assert sorted(rows, key=lambda t: t.key) == list(pool.rows())


def test_batches_can_be_read_with_zcat(pool, tmp_path):
    """A file is named by the sha256 of its uncompressed lines; its bytes depend on nothing else."""
    rows = [row(index=i, text="a\u2028b\n") for i in range(3)]
    digest = pool.publish(3, "ant", rows)
    path = pool.folder / "step-000003" / "ant" / f"{digest}.jsonl.gz"
    lines = subprocess.run(["zcat", path], capture_output=True, check=True).stdout
    assert hashlib.sha256(lines).hexdigest() == digest
    assert [json.loads(line)["index"] for line in lines.split(b"\n")[:-1]] == [0, 1, 2]
    other = Pool(tmp_path / "other")
    other.publish(3, "ant", rows[::-1])
    assert (other.folder / path.relative_to(pool.folder)).read_bytes() == path.read_bytes()
    pool.close(3, ["ant"])
    record = json.loads(unseal((pool.folder / "step-000003" / "snapshot.json").read_text()[:-1]))
    assert record == {"schema": 1, "step": 3, "batches": {"ant": digest}}


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
        ([row(step=4)], ValueError, "of step 5"),
        ([row(), row(index=1, text="\ud800")], UserError, "index 1: cannot.*surrogate"),
        ([replace(row(), mean_logprob=float("nan"))], UserError, "'q1'.*field mean_logprob"),
    ):
        with pytest.raises(error, match=f"agent 'ant', step 4.*{words}"):
            pool.publish(3, "ant", rows)
    assert list(pool.rows()) == [] and pool.arrived(3) == ()


def test_the_first_close_decides_and_late_batches_never_count(pool):
    for agent in ("ant", "bee", "cat"):
        pool.publish(3, agent, [row(agent)])
    assert not pool.closed(3)
    with pytest.raises(UserError, match=r"snapshot\.json: the file is missing"):
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


def test_an_empty_batch_is_an_arrival_and_without_one_no_step_closes(pool):
    with pytest.raises(ValueError, match="step 5"):
        pool.close(4, ["ant"])
    assert not pool.closed(4)
    pool.close(5, [])  # a hub may close a step that all members skipped
    assert pool.members(5) == ()
    pool.publish(4, "ant", [])
    assert pool.arrived(4) == ("ant",)
    pool.close(4, ["ant"])
    assert pool.members(4) == ("ant",)
    assert pool.snapshot(4).groups == ()


def test_a_reader_writes_nothing(pool, tmp_path):
    pool.publish(3, "ant", [row()])
    pool.close(3, ["ant"])
    reader = Pool(pool.folder, read_only=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert reader.snapshot(3) == pool.snapshot(3)
    assert list(reader.rows()) and reader.closed(3) and not reader.closed(4)
    with pytest.raises(UserError, match="does not exist"):
        Pool(tmp_path / "gone", read_only=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# ---------------------------------------------------------------- files that were changed


@pytest.fixture
def stored(pool):
    """A closed step; the path of the only batch in its snapshot."""
    pool.publish(3, "ant", [row()])
    pool.close(3, ["ant"])
    (path,) = (pool.folder / "step-000003" / "ant").iterdir()
    return path


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("sha256", lambda path: path.write_bytes(gzip.compress(b"{}\n"))),
        ("missing|must hold one file", lambda path: path.unlink()),
    ],
)
def test_a_changed_batch_is_noticed(pool, stored, words, change):
    pool.publish(3, "bee", [row("bee")])
    change(stored)
    for read in (lambda: pool.snapshot(3), lambda: list(pool.rows())):
        with pytest.raises(UserError, match=words) as error:
            read()
        assert str(stored.parent) in str(error.value)
        assert "`hacrl resume" in str(error.value)
    assert list(pool.rows("bee")) == [row("bee")]
    assert not pool.whole(3, "ant") and pool.whole(3, "bee")
    pool.publish(3, "ant", [row()])  # from the journal
    assert pool.whole(3, "ant") and keys(pool.snapshot(3)) == [(3, "ant", "q1", 0)]


def test_every_changed_or_missing_byte_is_noticed(pool, stored):
    """Time, operating system and flags in the gzip header do not change the lines."""
    before, data = pool.snapshot(3), stored.read_bytes()
    unnoticed = 0
    for place in range(len(data)):
        stored.write_bytes(data[:place])
        with pytest.raises(UserError, match="hacrl resume"):
            pool.snapshot(3)
        stored.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert pool.snapshot(3) == before
            unnoticed += 1
        except UserError:
            pass
    assert unnoticed < 10


def test_rows_of_another_agent_are_left_out(pool, stored):
    """The digest is right, the agent is not."""
    os.rename(stored.parent, stored.parent.with_name("bee"))
    record = stored.parents[1] / "snapshot.json"
    content = json.loads(unseal(record.read_text()[:-1]).replace('"ant"', '"bee"'))
    record.write_text(seal(content))
    snapshot = pool.snapshot(3)
    assert snapshot.groups == ()
    assert snapshot.unreadable == (("bee", "line 1: is of step 4 and agent 'ant'"),)
    reasons: list[str] = []
    assert list(pool.rows(report=reasons.append)) == [] and len(reasons) == 1


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("check value", "{"),
        ("check value", '{"schema": 1, "step": 3, "batches": {"ant": "%s"}}' % ("0" * 64)),
        ("another step", seal({"schema": 1, "step": 2, "batches": {}})),
        ("version", seal({"schema": 2, "step": 3, "batches": {}})),
    ],
)
def test_a_changed_snapshot_record_is_noticed(pool, stored, field, text):
    path = stored.parents[1] / "snapshot.json"
    path.write_text(text)
    for read in (pool.snapshot, pool.members):
        with pytest.raises(UserError, match=rf"{re.escape(str(path))}.*{field}"):
            read(3)


# ---------------------------------------------------------------- several processes, and kills

HEAD = """
import hashlib, sys, time
from pathlib import Path
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.store.rows import seal, unseal
from hacrl.types import *

def rows(agent, step, text="x" * 500):
    return [
        Trajectory(f"q{q}", "add", agent, i, step, 0, (Turn("assistant", text, True),),
                   Finish.STOP, -0.5, 3, Verdict(1.0, Status.OK), "v/1", Sampling(1.0, 8), True)
        for q in range(10) for i in range(4)
    ]
"""
WRITER = """
folder, *names = sys.argv[1:]
pool, agent = Pool(Path(folder)), names[0]
for step in range(12):
    pool.publish(step, agent, rows(agent, step))
    pool.publish(step, "both", rows("both", step))    # the other process publishes the same
    try:
        pool.publish(step, "disputed", rows("disputed", step, agent))
        won = 1
    except UserError:
        won = 0
    until = time.monotonic() + 300
    while step % 3 == 0 and len(pool.arrived(step)) < 4:    # otherwise close at once
        assert time.monotonic() < until, "the other process never arrived"
    pool.close(step, [*names, "both", "disputed"])
    print(step, hashlib.sha256(repr(pool.snapshot(step)).encode()).hexdigest(), won, flush=True)
"""


def test_two_processes_race(tmp_path):
    """Both publish the batch of "both", different ones of "disputed", and both close every step: all
    see one snapshot per step, one of the disputed batches wins, and nothing is lost."""
    processes = [start(HEAD + WRITER, tmp_path, *names) for names in (("a", "b"), ("b", "a"))]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [errors for _, errors in outputs] == ["", ""]
    one, two = ([line.split() for line in out.splitlines()] for out, _ in outputs)
    pool = Pool(tmp_path)
    for step in range(12):
        snapshot = pool.snapshot(step)
        digest = hashlib.sha256(repr(snapshot).encode()).hexdigest()
        assert one[step][:2] == two[step][:2] == [str(step), digest]
        assert {one[step][2], two[step][2]} == {"0", "1"}
        assert pool.arrived(step) == ("a", "b", "both", "disputed")
        assert len(list(pool.rows(step=step))) == 160
        assert len(keys(snapshot)) == 40 * len(snapshot.members) and "both" in snapshot.members
        assert len(snapshot.members) == 4 or step % 3


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
