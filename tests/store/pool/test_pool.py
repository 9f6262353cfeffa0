"""What every pool must do, whatever it is made of."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from hacrl.errors import UserError
from hacrl.store.pool import open_pool
from hacrl.types import Status, Verdict


def keys(cut):
    return [t.key for group in cut.groups for t in group.trajectories]


def test_gather_is_ordered_whatever_the_order_of_arrival(pool, row):
    rows = [row(a, q, i) for a in ("bee", "ant") for q in ("q2", "Q", "é", "q10") for i in (1, 0)]
    random.Random(0).shuffle(rows)
    pool.publish(rows[:7])
    pool.publish(rows[7:])
    pool.close(3, ["bee", "ant"])
    cut = pool.gather(3)
    assert cut.step == 3
    assert cut.members == ("bee", "ant")  # as given
    assert [g.problem_id for g in cut.groups] == ["Q", "q10", "q2", "é"]
    assert [g.task for g in cut.groups] == ["add"] * 4
    assert [t.key for t in cut.groups[0].trajectories] == [
        (3, "ant", "Q", 0),
        (3, "ant", "Q", 1),
        (3, "bee", "Q", 0),
        (3, "bee", "Q", 1),
    ]
    assert sorted(rows, key=lambda t: t.key) == list(pool.rows())


def test_same_row_twice_is_harmless_and_other_content_an_error(pool, row):
    first = row(index=0)
    pool.publish([first, row(index=1), first])
    pool.publish([first, row(index=2)])
    other = replace(first, verdict=Verdict(0.0, Status.WRONG))
    with pytest.raises(UserError, match=r"step 3, agent 'ant', problem 'q1', index 0 .*pool\.url"):
        pool.publish([row(index=7), other])
    with pytest.raises(UserError, match="index 8"):
        pool.publish([row(index=8), row(index=8, text="other")])
    # All or none: the good row beside the bad one did not get in.
    assert [t.index for t in pool.rows()] == [0, 1, 2]
    assert next(iter(pool.rows())) == first


def test_the_cut_is_written_once_and_late_rows_never_count(pool, row):
    pool.publish([row("ant"), row("bee"), row("cat")])
    assert not pool.closed(3)
    pool.close(3, ["ant", "bee"])
    before = pool.gather(3)
    assert keys(before) == [(3, "ant", "q1", 0), (3, "bee", "q1", 0)]  # cat is not a member
    pool.publish([row("ant", index=1), row("ant"), row("bee", problem="q0")])
    pool.close(3, ["ant", "bee", "cat"])
    pool.close(3, ["cat"])
    assert pool.closed(3)
    assert pool.gather(3) == before
    assert pool.late(3) == 2  # the repeated row of ant is not late: it was in time once
    assert len(list(pool.rows(step=3))) == 5


def test_steps_do_not_mix(pool, row):
    pool.publish([row(step=1), row(step=2), row("bee", step=2)])
    pool.close(2, ["ant", "bee"])
    pool.publish([row(step=1, index=1)])
    assert pool.late(1) == 0
    with pytest.raises(UserError, match="step 1 is not closed"):
        pool.gather(1)
    pool.close(1, ["ant"])
    assert keys(pool.gather(1)) == [(1, "ant", "q1", 0), (1, "ant", "q1", 1)]
    assert [t.key for t in pool.rows(agent="ant")] == [
        (1, "ant", "q1", 0),
        (1, "ant", "q1", 1),
        (2, "ant", "q1", 0),
    ]
    assert [t.key for t in pool.rows(agent="bee", step=2)] == [(2, "bee", "q1", 0)]


def test_arrivals(pool):
    assert pool.arrived(0) == ()
    for agent in ("bee", "ant", "bee"):
        pool.arrive(0, agent)
    pool.arrive(1, "cat")
    assert pool.arrived(0) == ("ant", "bee")


def test_a_step_without_rows_closes_to_an_empty_cut(pool):
    pool.publish([])
    pool.close(0, ["ant"])
    assert pool.gather(0).groups == ()


def test_what_cannot_be_stored_is_refused_by_key_and_field(pool, row):
    bad = {
        "mean_logprob": replace(row(), mean_logprob=float("nan")),
        "verdict.reward": replace(row(), verdict=Verdict(float("inf"), Status.OK)),
        "schema": replace(row(), schema=2),
        "surrogate": row(text="\ud800"),
        "num_tokens": replace(row(), num_tokens=-1),
        "index": row(index=-1),
    }
    for field, trajectory in bad.items():
        with pytest.raises(UserError, match=field) as error:
            pool.publish([trajectory])
        assert "q1" in str(error.value)
    assert list(pool.rows()) == []


def test_members_must_be_different_names(pool):
    for members in ([], ["ant", "ant"]):
        with pytest.raises(ValueError, match="step 4"):
            pool.close(4, members)
    assert not pool.closed(4)


def test_threads_share_one_pool(pool, row):
    """Eight threads publish, some of it twice, and race to close: one cut, nothing lost."""
    cuts = []

    def work(number):
        pool.publish([row(f"a{number // 2}", f"q{i}") for i in range(20)])
        pool.arrive(3, f"a{number // 2}")
        if len(pool.arrived(3)) == 4:
            pool.close(3, [f"a{i}" for i in range(4)][:: 1 if number % 2 else -1])
            cuts.append(pool.gather(3))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cuts
    assert all(cut == cuts[0] for cut in cuts)
    assert len(keys(cuts[0])) == 80


def test_urls(tmp_path):
    for url in ("redis://host/1", "pool.db", "", "sqlite:pool.db"):
        with pytest.raises(UserError, match="memory://, sqlite://"):
            open_pool(url, tmp_path)
    for url in ("sqlite://", "sqlite:///:memory:", "sqlite://host/x.db"):
        with pytest.raises(UserError, match="sqlite:///NAME"):
            open_pool(url, tmp_path)
    with pytest.raises(UserError, match="memory://"):
        open_pool("memory://x", tmp_path)
    absolute = tmp_path / "deep" / "er" / "pool.db"
    open_pool(f"sqlite:///{absolute}", tmp_path / "elsewhere").dispose()
    assert absolute.exists()
    with pytest.raises(UserError, match="no such file"):
        open_pool("sqlite:///gone.db", tmp_path, create=False)
    assert not (tmp_path / "gone.db").exists()
