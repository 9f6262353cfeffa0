"""Agents as Ray actors on one machine: resume, ranks, signals, errors."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.engines

from process_table import marked, wait_until  # noqa: E402
from runtimes import CONFIG, actors, in_runtime  # noqa: E402
from team import NO_EVALUATION, member, team  # noqa: E402

import hacrl  # noqa: E402
from hacrl.cluster.actor import FollowerActor  # noqa: E402
from hacrl.cluster.ray import RayExecutor  # noqa: E402
from hacrl.errors import RunStopped, UserError  # noqa: E402
from hacrl.store.rundir import RunDirectory  # noqa: E402


def on_ray(config: dict[str, Any]) -> dict[str, Any]:
    return in_runtime(config, "ray")


@pytest.fixture(autouse=True, scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all tests of this file; a run finds it and leaves it running."""
    settings = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False}  # a GPU in name only
    ray.init(address="local", log_to_driver=False, **settings)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return hacrl.train(CONFIG, tmp_path_factory.mktemp("local") / "run")


def test_a_run_resumes_in_the_other_runtime(in_one_process: RunDirectory, tmp_path: Path) -> None:
    """Two steps in one process, the third with actors of a Ray that the run starts and ends itself."""
    without_gpus = team(member("wren"), member("finch"))  # that Ray finds none
    run = hacrl.train(without_gpus, tmp_path / "run", steps=2)
    config = run.config()
    on_actors = config.runtime.model_copy(update={"kind": "ray"})
    run.set_config(config.model_copy(update={"runtime": on_actors}))
    resume = [sys.executable, "-m", "hacrl", "resume", str(run.path), "steps=3"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(resume, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    trained = [row for row in run.metric_rows() if row["kind"] == "train"]
    assert trained == [row for row in in_one_process.metric_rows() if row["kind"] == "train"]


def test_an_agent_of_two_ranks_trains_as_one_of_one_rank(tmp_path: Path) -> None:
    """wren's weights are sharded over two actors. Sums are taken in another order, so numbers agree
    to rounding."""
    config = team(member("wren", ranks=2), member("finch"), steps=2, **NO_EVALUATION)
    run = hacrl.train(on_ray(config), tmp_path / "ray")
    config["agents"][0]["ranks"] = 1
    whole = hacrl.train(config, tmp_path / "local")
    for row, other in zip(run.metric_rows(), whole.metric_rows(), strict=True):
        assert row["reward"] == other["reward"]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_rank_that_dies_while_its_agent_waits(tmp_path: Path, monkeypatch: Any) -> None:
    """wren has rolled out and waits for finch, when its second rank is killed. It restarts at its next
    call, and no number changes."""
    config = on_ray(team(member("wren", ranks=2), member("finch"), steps=2, **NO_EVALUATION))
    plain = hacrl.train(config, tmp_path / "plain")
    killed: set[int] = set()
    real_call = RayExecutor.call

    async def call(executor: RayExecutor, name: str, method: str, *args: Any) -> Any:
        if not killed and (name, method, args) == ("finch", "rollout", (1,)):
            while "wren" in executor.calling:
                await asyncio.sleep(0.05)
            for pid in actors("FollowerActor"):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(1.0)
        return await real_call(executor, name, method, *args)

    monkeypatch.setattr(RayExecutor, "call", call)
    with pytest.warns(UserWarning, match="'wren' was lost in step 2"):
        run = hacrl.train(config, tmp_path / "run")
    assert len(killed) == 1
    assert run.metrics_path.read_bytes() == plain.metrics_path.read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_the_driver(tmp_path: Path, number: int, code: int) -> None:
    """The run has a Ray of its own, which ends with it."""
    file = tmp_path / "team.toml"
    file.write_text(tomli_w.dumps(on_ray(team(member("wren"), steps=500, **NO_EVALUATION))))
    command = [sys.executable, "-m", "hacrl", "train", str(file), "--run", str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    child = subprocess.Popen(command, env=environment)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: child.poll() is not None or (metrics.exists() and metrics.stat().st_size))
    child.send_signal(number)
    assert child.wait(timeout=30) == code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_driver_that_ends_while_ray_starts_leaves_no_process(
    tmp_path: Path, number: int, code: int
) -> None:
    """SIGTERM had the exit code 15, that of Ray's own handler."""
    file, mark = tmp_path / "team.toml", f"TEST_MARK={uuid.uuid4().hex}"
    file.write_text(tomli_w.dumps(on_ray(team(member("wren"), steps=500, **NO_EVALUATION))))
    command = [sys.executable, "-m", "hacrl", "train", str(file), "--run", str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    child = subprocess.Popen(command, env=environment | dict([mark.split("=")]))
    wait_until(lambda: child.poll() is not None or "raylet" in str(marked(mark)), every=0.02)
    child.send_signal(number)
    assert child.wait(timeout=30) == code
    wait_until(lambda: not marked(mark), 60)


# ---------------------------------------------------------------- errors


def test_missing_resources_are_reported(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("hacrl.cluster.ray.PATIENCE", 1.0)
    for settings, words in (
        ({"cpus": 999}, "ask for 1000 CPU in all"),
        ({"resources": {"moon": 1}}, "1 moon in all, but the cluster has 0"),
        ({"device": "cuda:1"}, "Ray assigns the GPUs"),
    ):
        config = team(member("wren", **settings), member("finch"), **NO_EVALUATION)
        with pytest.raises(UserError, match=words):
            hacrl.train(on_ray(config), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_user_error_in_an_actor_is_reported(tmp_path: Path) -> None:
    broken = team(member("wren"), max_prompt_tokens=9999, **NO_EVALUATION)
    with pytest.raises(UserError, match="reads at most") as kept:
        hacrl.train(on_ray(broken), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    wait_until(lambda: not actors())  # all actors end, also while the error object exists
    assert kept.value
    gone = team({"name": "a", "model": "/no/such/model"}, **NO_EVALUATION)
    with pytest.raises(UserError, match="does not exist"):
        hacrl.train(on_ray(gone), tmp_path / "run")


def test_another_version_of_hacrl_is_reported_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """The actors have another version than the driver; restarting them would not help."""
    monkeypatch.setattr(hacrl, "__version__", "9.9")
    config = team(member("wren", ranks=2), **NO_EVALUATION)
    with pytest.raises(UserError, match=r"started with 9\.9\. Install the same version"):
        hacrl.train(on_ray(config), tmp_path / "run")


def test_the_reason_of_a_failed_rank_is_reported(tmp_path: Path, monkeypatch: Any) -> None:
    class Failing(FollowerActor):
        def follow(self, rank: int, address: str) -> Any:
            raise MemoryError("no room for the shard")

    monkeypatch.setattr("hacrl.cluster.ray.FollowerActor", Failing)
    monkeypatch.setattr("hacrl.training.loop.MAX_LOSSES", 1)
    config = team(member("wren", ranks=2), **NO_EVALUATION)
    with pytest.raises(RunStopped, match=r"lost in step 1 \(MemoryError: no room for the shard\)"):
        hacrl.train(on_ray(config), tmp_path / "run")


def test_an_agent_that_always_dies_stops_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    """The algorithm's module ends every process that imports it, except the driver."""
    (tmp_path / "deadly.py").write_text(
        "import os\nfrom hacrl.algorithms.gspo import Gspo as Rule\n"
        f"if os.getpid() != {os.getpid()}:\n    os._exit(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    config = team(member("wren"), steps=1, **NO_EVALUATION)
    config["algorithm"] = {"name": "deadly:Rule"}
    with pytest.warns(UserWarning, match="was lost"), pytest.raises(RunStopped, match="5th time"):
        hacrl.train(on_ray(config), tmp_path / "run")
