"""The pool in a database: several processes, and a file that nobody should trust."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from types import SimpleNamespace

import pytest

from hacrl.errors import UserError
from hacrl.store.pool import database, open_pool

URL = "sqlite:///pool.db"

WRITER = """
import hashlib, sys, time
from pathlib import Path
from hacrl.store.pool import open_pool
from hacrl.types import *

folder, agent, other = sys.argv[1:]
pool = open_pool("sqlite:///pool.db", Path(folder))
for step in range(12):
    rows = [
        Trajectory(f"q{q}", "add", name, i, step, 0, (Turn("assistant", "x" * 500, True),),
                   Finish.STOP, -0.5, 3, Verdict(1.0, Status.OK), "v/1", Sampling(1.0, 8), True)
        for name in (agent, "both") for q in range(10) for i in range(4)
    ]
    pool.publish(rows[:40])
    pool.publish(rows[40:])          # the same rows come from the other process too
    pool.arrive(step, agent)
    if step % 3 == 0:                # wait for the other, then race; otherwise just race
        until = time.monotonic() + 300
        while len(pool.arrived(step)) < 2:
            assert time.monotonic() < until, f"{other} never arrived"
    pool.close(step, [agent, other, "both"])
    cut = pool.gather(step)
    print(step, hashlib.sha256(repr(cut).encode()).hexdigest(), flush=True)
"""


def test_two_processes_race_on_one_file(tmp_path, start):
    """Both publish the rows of "both", and both close every step: each step has one cut, the same
    for both, and no row is lost: what does not count is marked late."""
    processes = [start(WRITER, str(tmp_path), *names) for names in (("ant", "bee"), ("bee", "ant"))]
    (one, error_one), (two, error_two) = [p.communicate(timeout=600) for p in processes]
    assert (error_one, error_two) == ("", "")
    assert one == two
    pool = open_pool(URL, tmp_path)
    for step, line in enumerate(one.splitlines()):
        cut = pool.gather(step)
        assert line == f"{step} {hashlib.sha256(repr(cut).encode()).hexdigest()}"
        counted = sum(len(group.trajectories) for group in cut.groups)
        assert counted + pool.late(step) == len(list(pool.rows(step=step))) == 120
        if step % 3 == 0:
            assert counted == 120
    assert step == 11


def test_a_new_file_that_another_process_locks_is_waited_for(tmp_path, monkeypatch):
    """Two processes open one new file at once: its journal cannot change while the other writes,
    and SQLite says so at once instead of waiting."""
    other = sqlite3.connect(tmp_path / "pool.db")
    other.execute("CREATE TABLE other (x)")
    other.execute("BEGIN IMMEDIATE")
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        other.rollback()

    monkeypatch.setattr(database, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    pool = open_pool(URL, tmp_path)
    assert len(waited) == 1
    other.close()
    assert pool.arrived(0) == ()
    pool.dispose()


@pytest.fixture
def stored(tmp_path, row):
    pool = open_pool(URL, tmp_path)
    pool.publish([row("ant"), row("ant", index=1), row("bee")])
    pool.close(3, ["ant", "bee"])
    yield pool
    pool.dispose()


def edit(folder, statement, *values):
    with sqlite3.connect(folder / "pool.db") as connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def body(folder, change):
    where = "WHERE agent = 'bee'"
    with sqlite3.connect(folder / "pool.db") as connection:
        (text,) = connection.execute(f"SELECT body FROM trajectories {where}").fetchone()
    connection.close()
    edit(folder, f"UPDATE trajectories SET body = ? {where}", change(text))


def changed(**fields):
    return lambda text: json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("Invalid JSON", lambda text: text[:-5]),
        ("Invalid JSON", lambda text: ""),
        ("body", lambda text: text.encode()),
        ("object", lambda text: 7.5),
        ("surprise", changed(surprise=1)),
        ("verdict.surprise", changed(verdict={"reward": 1.0, "status": "ok", "surprise": 1})),
        ("turns.0.text", changed(turns=[{"role": "a", "text": 3, "generated": True}])),
        ("num_tokens", changed(num_tokens="3")),
        ("num_tokens", changed(num_tokens=-3)),
        ("shareable", changed(shareable=1)),
        ("finish", changed(finish="bored")),
        ("schema", changed(schema=2)),
        ("mean_logprob", changed(mean_logprob=float("nan"))),
        ("mean_logprob", lambda text: text.replace("-0.1", "-1e999")),
        ("verdict.reward", changed(verdict={"reward": float("inf"), "status": "ok"})),
        ("agent", changed(agent="ant")),
        ("problem_id", changed(problem_id="q2")),
        ("index", changed(index=5)),
        ("step", changed(step=4)),
    ],
)
def test_a_tampered_row_is_caught(tmp_path, stored, field, change):
    body(tmp_path, change)
    for read in (lambda: stored.gather(3), lambda: list(stored.rows())):
        with pytest.raises(UserError, match=field) as error:
            read()
        assert "pool.db, step 3, agent 'bee', problem 'q1', index 0" in str(error.value)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM trajectories WHERE agent = 'bee'",
        "UPDATE trajectories SET step = 4 WHERE agent = 'bee'",
        "UPDATE trajectories SET idx = 'x' WHERE agent = 'bee'",
    ],
)
def test_a_missing_row_is_caught(tmp_path, stored, statement):
    edit(tmp_path, statement)
    with pytest.raises(UserError, match="agent 'bee', problem 'q1', index 0: counts in the cut"):
        stored.gather(3)


@pytest.mark.parametrize("column", ["step", "idx"])
def test_a_key_of_another_type_is_caught(tmp_path, stored, row, column):
    stored.publish([row("ant", step=4), row("bee", step=4)])
    edit(tmp_path, f"UPDATE trajectories SET {column} = 'x' WHERE step = 4 AND agent = 'bee'")
    with pytest.raises(UserError, match=r"'x'.*changed outside"):
        list(stored.rows())
    if column == "idx":
        with pytest.raises(UserError, match="step 4, agent 'bee', problem 'q1', index 'x'"):
            stored.close(4, ["ant", "bee"])


def test_a_row_slipped_in_does_not_count(tmp_path, stored, row):
    before = stored.gather(3)
    edit(
        tmp_path,
        "INSERT INTO trajectories SELECT step, agent, problem_id, 9, 0, body FROM trajectories "
        "WHERE agent = 'bee'",
    )
    assert stored.gather(3) == before


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("Invalid JSON", "{"),
        ("members", '{"step": 3, "rows": {}}'),
        ("step", '{"step": 2, "members": ["ant"], "rows": {"ant": {}}}'),
        ("rows", '{"step": 3, "members": ["ant"], "rows": {"bee": {}}}'),
        ("rows.ant.q1.0", '{"step": 3, "members": ["ant"], "rows": {"ant": {"q1": ["0"]}}}'),
        ("schema", '{"step": 3, "members": ["ant"], "rows": {"ant": {}}, "schema": 2}'),
    ],
)
def test_a_tampered_cut_is_caught(tmp_path, stored, field, text):
    edit(tmp_path, "UPDATE cuts SET body = ?", text)
    with pytest.raises(UserError, match=field) as error:
        stored.gather(3)
    assert "cut of step 3" in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:s3cret@db/pool",  # no such kind
        "postgresql://me:s3cret@db:port/pool",  # not an address
        "postgresql://me:x/s3cret@db/pool",
        "sqlite://me:s3cret@db/pool",
        "memory://me:s3cret@db",
        "mysql://db/pool?user=me&password=s3cret",
    ],
)
def test_a_password_is_not_told(tmp_path, url):
    with pytest.raises(UserError, match=r"pool\.url = ") as error:
        open_pool(url, tmp_path)
    assert "s3cret" not in str(error.value)


def test_a_file_that_is_no_pool(tmp_path):
    (tmp_path / "pool.db").write_text("this is not a database at all, only some text\n" * 50)
    with pytest.raises(UserError, match=r"pool\.db: not usable as a pool: file is not a database"):
        open_pool(URL, tmp_path)


def test_a_full_disk_keeps_what_was_there(tmp_path, stored, row):
    """SQLite meets its page limit as it meets the end of the disk: SQLITE_FULL."""
    before = stored.gather(3)
    with stored._db.read() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=12")
    with pytest.raises(UserError, match=r"pool\.db.*full.*MB free.*hacrl resume RUN"):
        stored.publish([row("ant", f"p{i}", step=4, text="x" * 4000) for i in range(50)])
    assert list(stored.rows(step=4)) == []
    assert stored.gather(3) == before


def test_a_closed_step_outlives_the_process(tmp_path, start):
    """kill -9 right after close() returns: the cut is there."""
    script = WRITER.split("for step")[0] + (
        "pool.close(5, [agent]); print('closed', flush=True); import time; time.sleep(600)"
    )
    process = start(script, str(tmp_path), "ant", "bee")
    assert process.stdout.readline() == "closed\n"
    process.kill()
    process.communicate()
    assert open_pool(URL, tmp_path, create=False).gather(5).members == ("ant",)
