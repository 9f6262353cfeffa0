"""Two agents on one GPU, each in a process of its own: with Ray, and without it.

HACRL_TEST_DEVICE=cpu runs the same tests without a GPU.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtimes import (
    CONFIG,
    actors,
    assert_same_run,
    in_runtime,
    kill_agents,
    process_ids,
)

import hacrl
from hacrl.cluster.processes import ProcessExecutor
from hacrl.cluster.ray import RayExecutor
from hacrl.store.rundir import RunDirectory

DEVICE = os.environ.get("HACRL_TEST_DEVICE", "cuda")
NO_RAY = importlib.util.find_spec("ray") is None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*was lost in step 2"),
]


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    config = in_runtime(CONFIG, "local", device=DEVICE)
    return hacrl.train(config, tmp_path_factory.mktemp("local") / "run")


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """A Ray with one GPU, for all tests of this file."""
    import ray

    settings = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False}
    ray.init(address="local", log_to_driver=False, **settings)
    yield
    ray.shutdown()


@pytest.mark.parametrize("lost", [False, True], ids=["undisturbed", "killed"])
@pytest.mark.parametrize(
    "kind",
    [
        "processes",
        pytest.param("ray", marks=pytest.mark.skipif(NO_RAY, reason="Ray is not installed")),
    ],
)
def test_two_agents_on_one_device(
    kind: str,
    lost: bool,
    in_turn: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The numbers of a run in turn, also if both processes are killed while one of them learns."""
    if kind == "ray":
        request.getfixturevalue("one_ray")
    executor, find = {
        "processes": (ProcessExecutor, process_ids),
        "ray": (RayExecutor, lambda _: actors()),
    }[kind]
    killed = kill_agents(monkeypatch, executor, find if lost else lambda _: ())
    run = hacrl.train(in_runtime(CONFIG, kind, device=DEVICE), tmp_path / "run")
    assert len(killed) == (2 if lost else 0)
    assert_same_run(run, in_turn, DEVICE)
