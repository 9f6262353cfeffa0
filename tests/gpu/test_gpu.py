"""A team on a GPU, and a GPU against the CPU. Run: python -m pytest -m gpu tests/gpu"""

import shutil
from pathlib import Path

import pytest
import torch
from team import member, team

import hacrl
from hacrl.config import AgentConfig
from hacrl.noise import exponential_noise, stream_key
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.store.journal import Journal
from hacrl.types import Message

pytestmark = pytest.mark.gpu


def test_noise_is_the_same_on_both_devices() -> None:
    keys = torch.tensor([stream_key(0, "wren", 0, f"p{i}", 0) for i in range(50)])
    positions = torch.arange(50)
    cpu = exponential_noise(keys, positions, 1000).log_().neg_()
    gpu = exponential_noise(keys.cuda(), positions.cuda(), 1000).cpu().log_().neg_()
    assert torch.allclose(cpu, gpu, atol=1e-4)


@pytest.mark.parametrize("name", ["wren", "finch", "heron"])
def test_float32_replies_are_those_of_the_cpu(name: str) -> None:
    """Same weights and random streams: nearly all replies are equal to the last token."""
    replies = []
    for device in ("cpu", "cuda"):
        agent = AgentConfig(name="a", model=f"pocket:{name}", dtype="float32")
        policy = Policy(agent, device=device, temperature=1.0, beta=0.0)
        prompts = [policy.renderer.prompt([Message("user", f"{i}+{i + 7}")]) for i in range(100)]
        keys = [stream_key(0, "a", 0, str(i), 0) for i in range(100)]
        asked = [Request(p, key, 24) for p, key in zip(prompts, keys, strict=True)]
        replies.append([r.token_ids for r in policy.sampler.sample(asked, 1.0)])
    same = sum(a == b for a, b in zip(*replies, strict=True))
    assert same >= 98


def test_a_team_in_bfloat16_on_one_gpu_learns_and_replays_its_journal(tmp_path: Path) -> None:
    config = team(member("wren"), member("finch"), member("heron"))
    config["runtime"] = {"device": "cuda"}
    config |= {"steps": 6, "prompts_per_step": 16, "samples_per_prompt": 8, "minibatch_samples": 64}
    run = hacrl.train(config, tmp_path / "run")
    rewards = [r["reward"] for r in run.metric_rows() if r["kind"] == "train"]
    assert sum(rewards[-6:]) > sum(rewards[:6])  # the last two steps against the first two
    names = ("wren", "finch", "heron")
    before = {(a, s): Journal(run.journal(a)).read(s) for a in names for s in range(6)}
    for name in names:  # without the newest checkpoint step 5 is replayed
        shutil.rmtree(run.checkpoints(name) / "step-000006")
    hacrl.resume(run.path)
    after = {key: Journal(run.journal(key[0])).read(key[1]) for key in before}
    assert after == before
