"""Policies and teams that sample with vLLM, on the CPU (tests/engines) and on a GPU (tests/gpu)."""

from pathlib import Path
from typing import Any

import torch
from team import team
from wide_pocket import wide_member

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Reply, Request
from hacrl.types import Message

NAMES = ("wren", "finch", "heron")  # Llama with tied embeddings, Qwen3, Llama
TEMPERATURE = 0.8
VLLM = {"kind": "vllm", "options": {"cache_gib": 0.1}}
NO_EVALUATION = {"evaluation": {"problems": 0}}


def wide_pocket(folder: Path) -> dict[str, Path]:
    """The pocket team with head sizes that vLLM's CPU kernels support."""
    return {name: wide_member(name, folder / name) for name in NAMES}


def wide_team(wide: dict[str, Path], *names: str, **settings: Any) -> dict[str, Any]:
    rate = settings.pop("learning_rate", 2e-4)
    members = [{"name": n, "model": str(wide[n]), "learning_rate": rate} for n in names]
    return team(*members, **{"sampler": VLLM, **settings})


def make_policy(
    folder: Path,
    kind: str = "vllm",
    *,
    device: str = "cpu",
    options: dict[str, Any] = VLLM["options"],
    **agent: Any,
) -> Policy:
    settings = {"kind": kind, "max_tokens": 400, "options": options}
    return Policy(
        AgentConfig(name="it", model=str(folder), **agent),
        device=device,
        temperature=TEMPERATURE,
        beta=0.0,
        sampler=SamplerConfig.model_validate(settings),
    )


def requests(policy: Policy, samples: int = 8, limit: int = 40) -> list[Request]:
    prompts = [policy.renderer.prompt((Message("user", q),)) for q in ("17+25", "23*4", "90-9")]
    return [
        Request(prompt, stream_key(0, "it", 0, str(n), i), limit)
        for n, prompt in enumerate(prompts)
        for i in range(samples)
    ]


def move(policy: Policy, by: float, seed: int) -> None:
    """Change every trained weight by plus or minus `by`, about what an AdamW update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.master.values():
            change = by * torch.randn(master.shape, generator=generator).sign()
            master.add_(change.to(master.device))
    policy._write_back()
    policy.sampler.weights_changed()


def gaps(policy: Policy, asked: list[Request], replies: list[Reply]) -> list[float]:
    """Absolute differences between vLLM's and the trainer's log-probabilities of the replies."""
    scores = policy.score(
        [(r.prompt_ids, a.token_ids) for r, a in zip(asked, replies, strict=True)]
    )
    return [
        abs(x - y)
        for score, reply in zip(scores, replies, strict=True)
        for x, y in zip(score, reply.logprobs, strict=True)
    ]


def follow(policy: Policy, changes: tuple[float, ...]) -> list[float]:
    """Mean difference per token between vLLM and trainer after each change of the weights."""
    asked, found = requests(policy), []
    for seed, by in enumerate(changes):
        move(policy, by, seed)
        each = gaps(policy, asked, policy.sampler.sample(asked, TEMPERATURE))
        found.append(sum(each) / len(each))
    return found
