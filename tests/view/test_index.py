"""The index of a run that is written directly through the store: filters, search, changes, memory."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from view_load import AGENTS, config, sample_rows, trajectory

from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.types import Trajectory
from hacrl.view.index import Index
from hacrl.view.live import LiveRun
from hacrl.view.replies import list_replies, step_problems
from hacrl.view.teaching import teaching

STEPS, EACH = 3, 8  # replies of an agent in a step


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RunDirectory.create(tmp_path / "run", config(STEPS, tmp_path))
    noise = random.Random(0)
    for step in range(STEPS):
        rows = [trajectory(step, a, i % 2, i // 2, noise) for a in AGENTS for i in range(EACH)]
        write_step(run, step, rows, noise)
    return run


def write_step(run: RunDirectory, step: int, rows: list[Trajectory], noise: random.Random) -> None:
    pool = Pool(run.pool_path)
    for agent in AGENTS:
        pool.publish(step, agent, [row for row in rows if row.agent == agent])
    pool.close(step, AGENTS)
    for agent in AGENTS:
        run.write_samples(agent, step, sample_rows(rows, noise))


def total(index: Index, **query: Any) -> int:
    return list_replies(index, {k: str(v) for k, v in query.items()})["total"]


def replies(run: RunDirectory) -> list[Trajectory]:
    return list(Pool(run.pool_path, read_only=True).rows())


def test_filters_agree_with_the_files(run: RunDirectory) -> None:
    index = Index(LiveRun.open(run.path))
    assert not index.progress()["complete"]
    assert index.refresh() == STEPS and index.refresh() == 0
    assert index.progress() == {"done": STEPS, "total": STEPS, "complete": True, "error": ""}
    every = replies(run)
    assert total(index) == len(every) == 96 and total(index, step=2) == 32
    right = [t for t in every if t.agent == "bee" and t.reward > 0]
    assert total(index, author="bee", reward="positive") == len(right)
    assert total(index, finish="length") == sum(t.finish.value == "length" for t in every)
    rows = [row for step in range(STEPS) for row in run.sample_rows(step, "cow")]
    used = [r for r in rows if r["source"] == "dog" and r["advantage"] and r["used"]]
    assert total(index, learner="cow", used="used", author="dog") == len(used)
    word = every[40].text.split()[-1]  # a number
    texts = [f"{t.text} {t.verdict and t.verdict.detail}".split() for t in every]
    found = sum(any(part.startswith(word) for part in text) for text in texts)
    assert total(index, q=word) == found >= 1
    assert total(index, q='" OR NEAR( *') == 0  # no syntax of the search engine


def test_a_step_that_changed_is_indexed_again(run: RunDirectory) -> None:
    index = Index(LiveRun.open(run.path))
    index.refresh()
    noise = random.Random(7)
    run.forget_from(2)
    assert index.refresh() == 0 and total(index) == 64
    rows = [trajectory(2, a, 0, i, noise) for a in AGENTS for i in range(2)]
    write_step(run, 2, rows, noise)
    assert index.refresh() == 1 and total(index) == 72
    again = Index(LiveRun.open(run.path))  # another server
    assert again.refresh() == 0 and total(again, q=rows[0].text) == 1


def test_a_run_without_stored_samples(run: RunDirectory) -> None:
    """Nothing is said about single replies; counts come from the metrics. One step has its samples."""
    for path in run.path.glob("samples/*/step-00000[12].jsonl"):
        path.unlink()
    live = LiveRun.open(run.path)
    index = Index(live)
    index.refresh()
    pairs = {(p["learner"], p["source"]): p for p in teaching(live, index)["pairs"]}
    assert pairs["cow", "dog"]["offered"] == EACH
    assert total(index, learner="cow", used="none") == 0 and total(index, step=2) == 32
    uses = [
        {
            reply["learners"]["cow"]["use"]
            for p in step_problems(live, step, {})
            for reply in p["replies"]
        }
        for step in (0, 1)
    ]
    assert "used" in uses[0] and uses[1] == {""}
    shutil.rmtree(run.path / "samples")
    index.refresh()
    assert not any(pair["counted"] for pair in teaching(live, index)["pairs"])


def test_a_run_with_other_learners_has_another_index(run: RunDirectory) -> None:
    old = LiveRun.open(run.path)
    index = Index(old)
    index.refresh()
    pairs = [p for p in teaching(old, index)["pairs"] if p["learner"] != "ant"]
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace("learn = true", "learn = false", 1))  # of ant
    new = LiveRun.open(run.path)  # another server
    again = Index(new)
    assert again.learners == ["bee", "cow", "dog"]
    assert not any(pair["counted"] for pair in teaching(new, again)["pairs"])
    assert again.refresh() == STEPS
    assert teaching(new, again)["pairs"] == pairs


def test_a_damaged_step_is_named_and_the_others_are_listed(run: RunDirectory) -> None:
    batch = next((run.pool_path / "step-000001" / "bee").iterdir())
    batch.write_bytes(batch.read_bytes()[:-8])
    index = Index(LiveRun.open(run.path))
    index.refresh()
    assert total(index) == 64 and str(batch) in index.progress()["error"]


def test_without_a_cache_folder(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = Index(LiveRun.open(run.path))
    index.refresh()
    assert total(index) == 96 and total(index, q=replies(run)[0].text.split()[-1]) >= 1
