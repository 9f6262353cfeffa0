"""Sharded policies on GPUs, through nccl: bfloat16 with float32 shards. One rank needs one GPU.

HACRL_TEST_DEVICE=cpu runs the same tests without a GPU, through gloo.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from team import member, team

import hacrl
from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.policy.sharding.process_group import RankGroup, join_group, leave_world, open_store
from hacrl.policy.sharding.sharded import ShardedPolicy
from hacrl.sampling.base import Request
from hacrl.types import Message, Sample, Update

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("HACRL_TEST_DEVICE", "cuda")


@pytest.fixture
def group() -> Iterator[RankGroup]:
    store = open_store()
    made = join_group(0, 1, f"127.0.0.1:{store.port}", device=DEVICE, agent="a", store=store)
    yield made
    leave_world(made)


def rows(policy: Policy) -> list[Sample]:
    asked = [
        Request(
            policy.renderer.prompt([Message("user", f"{i}+{i + 7}")]),
            stream_key(0, "a", 0, str(i), 0),
            24,
        )
        for i in range(32)
    ]
    made = []
    for i, (r, reply) in enumerate(zip(asked, policy.sampler.sample(asked, 1.0), strict=True)):
        mask = (0,) * len(r.prompt_ids) + (1,) * len(reply.token_ids)
        mean = sum(reply.logprobs) / len(reply.logprobs)
        sample = Sample(str(i), 0, "a", True, r.prompt_ids + reply.token_ids, mask, mean)
        made.append(replace(sample, old_logprobs=reply.logprobs, advantage=(-1.0) ** i))
    return made


def test_the_channels_of_a_group(group: RankGroup) -> None:
    """Tensors of the device go through the data channel, objects through the control channel."""
    device = torch.device(DEVICE)
    backend = group.data._get_backend(device).name()
    assert backend == ("nccl" if device.type == "cuda" else "gloo")
    tensor = torch.arange(6.0, device=device)
    dist.all_reduce(tensor, group=group.data)
    whole = torch.empty(6, device=device)
    dist.all_gather_into_tensor(whole, tensor, group=group.data)
    part = torch.empty(6, device=device)
    dist.reduce_scatter_tensor(part, whole, group=group.data)
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert group.mesh(device).size() == 1
    group.broadcast(("score", 1))
    assert group.gather("a") == group.all_gather("a") == ["a"]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("lora", [None, {"rank": 8}], ids=["whole", "adapter"])
def test_updates_are_those_of_the_whole_policy(
    group: RankGroup, dtype: str, tolerance: float, lora: dict | None
) -> None:
    agent = AgentConfig(
        name="a",
        model="pocket:wren",
        dtype=dtype,
        lora=lora,
        learning_rate=1e-5,
        microbatch_tokens=300,
    )
    whole = Policy(agent, device=DEVICE, temperature=1.0, beta=0.01)
    sharded = ShardedPolicy(agent, group=group, device=DEVICE, temperature=1.0, beta=0.01)
    settings = make_settings("gspo", beta=0.01, epsilon_low=0.9, epsilon_high=9.0)
    loss, update = make_algorithm(settings).loss, Update(0, 0.8, "own", ())
    batch = rows(whole)
    for _ in range(3):
        mine, theirs = (p.update(batch, loss, update) for p in (sharded, whole))
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)
        assert mine.loss == pytest.approx(theirs.loss, abs=tolerance)
    assert not mine.skipped
    resident = dict(sharded.model.named_parameters())
    one, two = sharded.checkpoint(3), whole.checkpoint(3)
    for name, tensor in one.model.items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, two.model[name], atol=1e-4, rtol=0)
        assert torch.equal(resident[name].cpu(), tensor.to(resident[name].dtype))
    scores = sharded.score([(s.token_ids[:3], s.token_ids[3:]) for s in batch])
    assert [len(x) for x in scores] == [len(s.token_ids) - 3 for s in batch]
    drawn = rows(sharded)  # with the new weights, by graphs captured before
    scores = sharded.score([(s.prompt_ids, s.token_ids[-s.num_reply_tokens :]) for s in drawn])
    gaps = [abs(sum(x) / len(x) - s.behaviour) for s, x in zip(drawn, scores, strict=True)]
    assert sum(gaps) / len(gaps) < (1e-4 if dtype == "float32" else 0.05)
    whole.restore(one)
    sharded.restore(two)
    sharded.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_on_two_gpus_without_ray(tmp_path: Path) -> None:
    config = team(member("wren", ranks=2), member("finch"))
    config["runtime"] = {"device": "cuda"}
    run = hacrl.train(config, tmp_path / "run")
    assert [r["updates"] > 0 for r in run.metric_rows() if r["kind"] == "train"]
