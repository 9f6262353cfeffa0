"""Two agents on one device, each in a process of its own, with Ray and without it: the numbers and
weights of one process. On the CPU these are tests of the engines."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtimes import CONFIG, actors, assert_same_run, in_runtime, kill_agents, process_ids

import hacrl
from hacrl.cluster.processes import ProcessExecutor
from hacrl.cluster.ray import RayExecutor
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.rundir import RunDirectory

NO_RAY = importlib.util.find_spec("ray") is None
pytestmark = pytest.mark.filterwarnings("ignore:.*was lost in step 2")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.engines),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def in_turn(device: str, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    config = in_runtime(CONFIG, "local", device=device)
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
    device: str,
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
    run = hacrl.train(in_runtime(CONFIG, kind, device=device), tmp_path / "run")
    assert len(killed) == (2 if lost else 0)
    notes = " ".join(row["text"] for row in run.notes())
    assert ("'finch' was lost in step 2" in notes) == lost
    assert ("signal SIGKILL" in notes) == (lost and kind == "processes")
    assert_same_run(run, in_turn, device)
    for name in ("wren", "finch"):
        # The newest two; the best one may be a third.
        assert {2, 3} <= set(Checkpoints(run.checkpoints(name), 2).steps())
