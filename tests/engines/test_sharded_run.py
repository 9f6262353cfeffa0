"""Whole runs with agents on two ranks, each a process (gloo, CPU)."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process_table import running, wait_until
from team import member, team

import hacrl
from hacrl.config import parse_config
from hacrl.errors import RunStopped, UserError
from hacrl.policy.sharding.followers import LocalRanks
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.rundir import RunDirectory

pytestmark = pytest.mark.engines


def config(ranks: int, beta: float = 0.0, **settings: Any) -> dict[str, Any]:
    """One agent that trains all weights and one with adapters, both over `ranks` processes."""
    return team(
        member("wren", ranks=ranks),
        member("finch", ranks=ranks, lora={"rank": 8}),
        algorithm={"name": "hacpo", "epsilon_low": 3e-3, "epsilon_high": 4e-3, "beta": beta},
        evaluation={"every": 10, "problems": 12},
        **settings,
    )


def largest_gaps(one: RunDirectory, two: RunDirectory) -> tuple[float, float]:
    """Largest differences of gradient norms and of all other metrics, relative for values above 1.
    Values that are not floats must be equal."""
    norms, others = [0.0], [0.0]
    for mine, theirs in zip(one.metric_rows(), two.metric_rows(), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, float):
                gap = abs(value - theirs[key]) / max(1.0, abs(value))
                (norms if "norm" in key else others).append(gap)
            else:
                assert value == theirs[key], (mine["step"], key)
    return max(norms), max(others)


def weights_gap(one: RunDirectory, two: RunDirectory, step: int) -> float:
    gaps = []
    for name in ("wren", "finch"):
        mine, theirs = (Checkpoints(r.checkpoints(name), 2).load(step).model for r in (one, two))
        assert mine.keys() == theirs.keys()
        gaps += [(mine[n] - theirs[n]).abs().max().item() for n in mine]
    return max(gaps)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_twenty_steps_on_two_ranks_equal_the_unsharded_run(tmp_path: Path, beta: float) -> None:
    """All weights and adapters, with and without a KL term. Much cancels in gradients: other
    micro-batches change their norms by 5e-5 here, also without ranks."""
    whole, sharded = (
        hacrl.train(
            config(ranks, beta, steps=20, checkpoint={"every": 0}), tmp_path / f"ranks{ranks}"
        )
        for ranks in (1, 2)
    )
    norms, others = largest_gaps(whole, sharded)
    weights = weights_gap(whole, sharded, 20)
    print(
        f"beta {beta}: largest gaps {weights:.2g} weights, {others:.2g} others, {norms:.2g} norms"
    )
    assert weights < 1e-5
    assert others < 1e-5
    assert norms < 1e-4
    updates = [r["updates"] for r in sharded.metric_rows() if r["kind"] == "train"]
    assert sum(updates) > 60


def test_a_run_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    """2 steps on two ranks, 2 on one, 2 on two again equal 6 steps on one."""
    unbroken = hacrl.train(config(1, steps=6), tmp_path / "unbroken")
    run = hacrl.train(config(2, steps=2), tmp_path / "run")
    for ranks, steps in ((1, 4), (2, 6)):
        with pytest.warns(UserWarning, match=r"agents\.wren\.ranks: \d -> \d"):
            hacrl.resume(run.path, [f"agents.*.ranks={ranks}", f"steps={steps}"])
    assert weights_gap(unbroken, run, 6) < 1e-5
    trained = [
        [(r["step"], r["agent"], r["reward"]) for r in each.metric_rows() if r["kind"] == "train"]
        for each in (unbroken, run)
    ]
    assert trained[0] == trained[1]


def test_a_follower_that_dies_ends_the_run_with_its_reason() -> None:
    settings = parse_config(config(2))
    agent = settings.agents[0]
    with contextlib.ExitStack() as stack:
        ranks = LocalRanks(settings, stack)
        policy = ranks.policy(agent)
        (follower,) = ranks.followers["wren"]
        os.kill(follower.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RunStopped, match=r"'wren'.*rank.*gone.*SIGKILL.*resume"):
            policy.score([((1, 2), (3, 4))])
        assert time.monotonic() - begun < 120  # not after DATA_TIMEOUT
        with pytest.raises(RunStopped, match="failed before"):  # at once
            policy.checkpoint(0)
    assert not torch.distributed.is_initialized()


def test_local_ranks_listen_on_loopback_only() -> None:
    before = dict(os.environ)
    with contextlib.ExitStack() as stack:
        ranks = LocalRanks(parse_config(config(2)), stack)
        pids = [os.getpid(), *(f.pid for group in ranks.followers.values() for f in group)]
        addresses = [address for pid in pids for address in _listening(pid)]
    assert len(addresses) >= len(pids)
    assert {
        a for a in addresses if not a.startswith(("0100007F:", "0" * 24 + "01000000:"))
    } == set()
    assert os.environ == before


def test_the_reason_of_a_failed_follower_is_reported() -> None:
    settings = parse_config(config(2))
    with contextlib.ExitStack() as stack:
        policy = LocalRanks(settings, stack).policy(settings.agents[0])

        def broken_call() -> None:
            with policy.group.collective():
                policy.group.broadcast(("score", (None,)))
                policy.group.all_gather(None)

        with pytest.raises(RunStopped, match=r"rank 1: TypeError"):
            broken_call()


def test_a_missing_model_folder_is_reported() -> None:
    broken = config(2)
    broken["agents"][0]["model"] = "/nowhere/at/all"
    settings = parse_config(broken)
    with contextlib.ExitStack() as stack:
        ranks = LocalRanks(settings, stack)
        with pytest.raises((UserError, RunStopped), match="/nowhere"):
            ranks.policy(settings.agents[0])


LEADER = """
import sys
import hacrl
hacrl.train(sys.argv[1], sys.argv[2])
"""


def test_followers_end_when_the_leader_is_killed(tmp_path: Path) -> None:
    import tomli_w

    file = tmp_path / "team.toml"
    file.write_text(tomli_w.dumps(config(2, steps=500)))
    leader = subprocess.Popen([sys.executable, "-c", LEADER, str(file), str(tmp_path / "run")])
    try:
        followers = wait_until(lambda: _journalled(tmp_path) and _followers_of(leader.pid), 300)
        assert len(followers) == 2
    finally:
        leader.kill()
        leader.wait()
    assert wait_until(lambda: not set(followers) & set(running()), 300)
    run = RunDirectory.open(tmp_path / "run")
    run.set_config(run.config().model_copy(update={"steps": 3}))
    assert hacrl.resume(run.path).metric_rows()


def _journalled(place: Path) -> bool:
    return len(list((place / "run" / "journal").glob("*/*"))) >= 4


def _followers_of(parent: int) -> list[int]:
    children = {pid: command for pid, (its, command) in running().items() if its == parent}
    return [pid for pid, command in children.items() if "hacrl.policy.sharding" in command.split()]


def _listening(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, of the TCP sockets on which a process listens."""
    sockets = set()
    for entry in (Path("/proc") / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    files = [Path("/proc") / str(pid) / "net" / name for name in ("tcp", "tcp6")]
    rows = [line.split() for file in files if file.is_file() for line in file.open()]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in sockets]
