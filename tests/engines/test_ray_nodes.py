"""Agents on different nodes of a cluster, and nodes that die."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("ray")
pytestmark = pytest.mark.engines

sys.path.append(str(Path(__file__).parent))
from cluster import Cluster, Node, cluster  # noqa: E402
from team import member, team  # noqa: E402

import hacrl  # noqa: E402
from hacrl.store.journal import Journal  # noqa: E402
from hacrl.store.pool import Pool  # noqa: E402
from hacrl.store.rundir import RunDirectory  # noqa: E402

KILLS = 10
STEPS = 4 * KILLS  # more than the 3 steps between two kills, so that the run does not end before


def config(steps: int, **settings: Any) -> dict[str, Any]:
    return team(
        member("wren", resources={"left": 1}),
        member("finch", resources={"right": 1}),
        **{
            "steps": steps,
            "evaluation": {"every": 5, "problems": 6},
            "checkpoint": {"every": 3},
            **settings,
        },
    )


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with cluster() as made:
        made.head(left=1)
        made.wait_for_port()
        yield made


def start(nodes: Cluster, place: Path, settings: dict[str, Any], **runtime: Any) -> Any:
    """Start `hacrl train` with agents on the cluster."""
    settings = {
        **settings,
        "runtime": {
            **settings["runtime"],
            "kind": "ray",
            "address": nodes.address,
            "placement": "spread",
            **runtime,
        },
    }
    place.parent.mkdir(exist_ok=True, parents=True)
    file = place.with_suffix(".toml")
    file.write_text(tomli_w.dumps(settings))
    return subprocess.Popen(
        [sys.executable, "-m", "hacrl", "train", str(file), "--run", str(place)],
        env=nodes.environment,
        stdout=open(place.with_suffix(".log"), "w"),
        stderr=subprocess.STDOUT,
    )


def wait_until(happened: Any, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + 240
    while not happened():
        assert process.poll() is None, f"the run has ended: {log.read_text()}"
        assert time.monotonic() < until, f"timed out: {log.read_text()}"
        time.sleep(0.02)


def facts(run: RunDirectory, steps: int) -> tuple[list, list]:
    """All snapshots, and everything published."""
    pool = Pool(run.pool_path, read_only=True)
    return [pool.snapshot(step) for step in range(steps)], list(pool.rows())


def test_a_node_killed_ten_times_changes_no_number(nodes: Cluster, tmp_path: Path) -> None:
    """finch's node is killed at ten random moments, each after finch has worked again. The run finishes
    with the metrics, snapshots and rows of an undisturbed run in one process."""
    node: Node = nodes.node(right=1)
    place = tmp_path / "ray" / "run"
    process = start(nodes, place, config(STEPS))
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed of the moments:", seed)  # pytest shows it if the test fails
    draw = random.Random(seed)
    journal = Journal(place / "journal" / "finch")
    log = place.with_suffix(".log")
    try:
        for _ in range(KILLS):
            before = len(journal.steps())
            wait_until(lambda n=before: len(journal.steps()) > n, process, log)
            moment = time.monotonic() + draw.uniform(0, 1)
            wait_until(
                lambda n=before, at=moment: time.monotonic() > at or len(journal.steps()) > n + 2,
                process,
                log,
            )
            node.kill()
            node = nodes.node(right=1)
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
    lost = [line for line in log.read_text().splitlines() if "'finch' was lost" in line]
    assert len(lost) >= KILLS  # more if the next process started on the dead node
    undisturbed = hacrl.train(config(STEPS), tmp_path / "local")
    run = RunDirectory.open(place)
    assert run.metrics_path.read_bytes() == undisturbed.metrics_path.read_bytes()
    assert facts(run, STEPS) == facts(undisturbed, STEPS)
    snapshots, rows = facts(run, STEPS)
    assert len(rows) == sum(len(g.trajectories) for s in snapshots for g in s.groups)  # None late


def test_others_continue_without_a_lost_agent_and_it_catches_up(
    nodes: Cluster, tmp_path: Path
) -> None:
    """With a deadline and late = "go_on", steps are closed without finch while its node is dead. When it
    is back, it learns from the snapshots that it missed, without own rollouts, and takes part again."""
    node: Node = nodes.node(right=1)
    place, steps = tmp_path / "run", 40
    settings = config(steps, evaluation={"problems": 0})
    process = start(nodes, place, settings, deadline=6.0, late="go_on")
    journal = Journal(place / "journal" / "wren")
    log = place.with_suffix(".log")
    try:
        wait_until(lambda: len(journal.steps()) > 2, process, log)
        node.kill()
        before = len(journal.steps())
        wait_until(lambda: len(journal.steps()) > before + 3, process, log)
        nodes.node(right=1)
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
    run = RunDirectory.open(place)
    snapshots, rows = facts(run, steps)
    alone = [s.step for s in snapshots if s.members == ("wren",)]
    both = [s.step for s in snapshots if s.members == ("wren", "finch")]
    assert len(alone) >= 3 and len(alone) + len(both) == steps
    assert min(both) < min(alone) and max(both) > max(alone)  # it left and came back
    trained = [row for row in run.metric_rows() if row["kind"] == "train"]
    counted = {(row["step"], row["agent"]) for row in trained}
    assert len(trained) == len(counted) == 2 * steps  # every snapshot learned once by both
    for row in trained:
        missed = row["agent"] == "finch" and row["step"] in alone
        assert bool(row.get("absent")) == missed
        if missed:  # peers' rows only
            assert row["rollouts"] == row["own/samples"] == 0 and row["peers/samples"] > 0
        elif row["agent"] == "wren" and row["step"] in alone:
            assert row["peers/samples"] == 0 and "capability/finch" not in row
    keys = [t.key for t in rows]
    assert len(keys) == len(set(keys))
