"""What `hacrl doctor` says a step needs, against the peak of a real one.

    python benchmarks/memory_shapes.py --device cuda --out memory.json     # about a minute on a H200
    python benchmarks/memory_shapes.py --tiny                              # on a CPU: does it run?

For each case: models of random weights, the estimate from their config alone, then two steps of every
agent in turn (rollout, scores, an update of own samples and one of a peer's, rest). Replies are as long
as their limit allows, as the estimate supposes. If a case fails (the adapter needs peft), its
error is printed and the others continue; with --out every case is written as soon as it is done. Exit
code 1 if a case failed, or if prediction and measurement differ by more than 20 %.
"""

import argparse
import gc
import json
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from speed.shapes import SHAPES, make_policy

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import Config, parse_config
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.sampling.cache import ARENAS, device_memory
from hacrl.study.doctor.memory import device_peak, estimate_need
from hacrl.types import Sample, Update


@dataclass(frozen=True)
class Case:
    """A team on one device.

    Example: Case("pair", ("Qwen3-0.6B", "Qwen3-1.7B"), {"offload": "optimizer"})
    """

    name: str
    shapes: tuple[str, ...]
    agent: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("135M", ("SmolLM2-135M",)),
    Case("270M, large vocabulary", ("Gemma3-270M",)),
    Case("135M + 270M", ("SmolLM2-135M", "Gemma3-270M")),
    Case("0.6B", ("Qwen3-0.6B",)),
    Case("1.7B, checkpointing", ("Qwen3-1.7B",), {"gradient_checkpointing": True}),
    Case("1.7B, adapter", ("Qwen3-1.7B",), {"lora": {"rank": 32}}),
    Case("0.6B + 1.7B", ("Qwen3-0.6B", "Qwen3-1.7B"), {"offload": "none"}),
    Case("0.6B + 1.7B, parked", ("Qwen3-0.6B", "Qwen3-1.7B"), {"offload": "optimizer"}),
]
TINY = [
    Case("tiny", ("tiny-a",)),
    Case("tiny, checkpointing", ("tiny-a",), {"gradient_checkpointing": True}),
    Case("tiny pair", ("tiny-a", "tiny-b"), {"offload": "optimizer", "dtype": "bfloat16"}),
]
LOSS = make_algorithm(make_settings(epsilon_low=0.5, epsilon_high=0.5)).loss


@dataclass(frozen=True)
class Sizes:
    """Of the work: 128 sequences of 256 tokens, in micro-batches of 32 of them."""

    prompts: int = 16
    samples: int = 8
    prompt: int = 160
    reply: int = 96
    microbatch: int = 8192


def make_config(case: Case, sizes: Sizes, folder: Path) -> Config:
    for shape in case.shapes:
        SHAPES[shape].save_pretrained(folder / shape)
    return parse_config(
        {
            "steps": 1,
            "prompts_per_step": sizes.prompts,
            "samples_per_prompt": sizes.samples,
            "minibatch_samples": sizes.prompts * sizes.samples,
            "max_prompt_tokens": sizes.prompt,
            "max_response_tokens": sizes.reply,
            "task": {"kind": "arithmetic"},
            "verifier": {"kind": "number"},
            "agents": [
                {
                    "name": f"agent-{i}",
                    "model": str(folder / shape),
                    "microbatch_tokens": sizes.microbatch,
                    **case.agent,
                }
                for i, shape in enumerate(case.shapes)
            ],
        }
    )


def predict(config: Config, device: torch.device) -> tuple[float, str]:
    whole = device_memory(device)
    needs = {}
    for agent in config.agents:
        need = estimate_need(config, agent, agent.model, device, whole)
        assert need is not None, f"{agent.model}: its config does not contain its sizes"
        needs[agent.name] = need
    peak = device_peak(needs, whole, keeps_cache=device.type == "cuda")
    return peak.bytes, peak.when


def step(policies: list[Policy], sizes: Sizes, number: int, peaks: dict[str, float]) -> None:
    """Rollouts of all agents, then learning of all, as a run on one device does it."""
    device = policies[0].device
    rollouts: list[list[Sample]] = []
    for policy in policies:
        with _peak_of("rollout", device, peaks):
            rollouts.append(_rollout(policy, sizes, number))
    for policy, own in zip(policies, rollouts, strict=True):
        with _peak_of("learning", device, peaks):
            for m, part in enumerate(("own", "peers")):
                report = policy.update(own, LOSS, Update(m, 0.8, part, ("p",)))
                assert not report.skipped
            policy.offload()


def _rollout(policy: Policy, sizes: Sizes, number: int) -> list[Sample]:
    words = policy.model.get_input_embeddings().weight.shape[0]
    drawn = torch.Generator().manual_seed(number)
    prompts = torch.randint(1, words, (sizes.prompts, sizes.prompt), generator=drawn).tolist()
    requests = [
        Request(tuple(p), stream_key(number, "a", 0, str(i), k), sizes.reply)
        for i, p in enumerate(prompts)
        for k in range(sizes.samples)
    ]
    replies = policy.sampler.sample(requests, 1.0)
    pairs = [(r.prompt_ids, x.token_ids) for r, x in zip(requests, replies, strict=True)]
    return [
        Sample(
            problem_id="p",
            index=i,
            source="a",
            is_own=True,
            token_ids=(*prompt, *reply),
            loss_mask=(0,) * len(prompt) + (1,) * len(reply),
            behaviour=fmean(score),
            advantage=(-1.0) ** i,
        )
        for i, ((prompt, reply), score) in enumerate(zip(pairs, policy.score(pairs), strict=True))
    ]


class _peak_of:
    """Notes the highest allocation of a block, in `peaks`, by what it was for."""

    def __init__(self, name: str, device: torch.device, peaks: dict[str, float]) -> None:
        self.name, self.device, self.peaks = name, device, peaks

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            seen = torch.cuda.max_memory_allocated(self.device)
            self.peaks[self.name] = max(self.peaks.get(self.name, 0.0), float(seen))


def run(case: Case, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(case, sizes, Path(folder))
        predicted, when = predict(config, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    given = {"microbatch_tokens": sizes.microbatch, **case.agent}
    policies = [make_policy(shape, device, **given) for shape in case.shapes]
    peaks: dict[str, float] = {}
    for number in range(2):  # the second finds moments, and what the first left
        step(policies, sizes, number, peaks)
    measured = max(peaks.values()) - before if peaks else None
    return {
        **asdict(case),
        "predicted": predicted,
        "when": when,
        "measured": measured,
        "ratio": predicted / measured if measured else None,
        "phases": {name: seen - before for name, seen in peaks.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    given = parser.parse_args()
    device = torch.device(given.device)
    sizes = Sizes(4, 2, 12, 6, 40) if given.tiny else Sizes()
    rows: list[dict[str, Any]] = []
    for case in TINY if given.tiny else CASES:
        try:
            rows.append(run(case, sizes, device))
        except Exception:
            rows.append({**asdict(case), "failed": traceback.format_exc()})
        ARENAS.clear()  # the next case starts without a cache
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(_row_text(rows[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    failed = [r["name"] for r in rows if "failed" in r]
    far = [r["name"] for r in rows if r.get("ratio") and abs(r["ratio"] - 1) > 0.2]
    if failed:
        print(f"failed: {', '.join(failed)}")
    if far:
        print(f"more than 20 % off: {', '.join(far)}")
    return 1 if far or failed else 0


def _row_text(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:<24} failed:\n{row['failed']}"
    text = f"{row['name']:<24} predicted {row['predicted'] / 1e9:7.2f} GB ({row['when']})"
    if row["measured"]:
        phases = ", ".join(f"{name} {seen / 1e9:.2f}" for name, seen in row["phases"].items())
        text += f"  measured {row['measured'] / 1e9:7.2f} ({phases})  ratio {row['ratio']:.2f}"
    return text


if __name__ == "__main__":
    sys.exit(main())
