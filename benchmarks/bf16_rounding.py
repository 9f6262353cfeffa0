"""What rounding in bfloat16 does to GSPO's clip decisions, and what the correction leaves of it.

    python benchmarks/bf16_rounding.py Qwen3-1.7B SmolLM2-135M           # shapes with random weights
    python benchmarks/bf16_rounding.py models/smollm2-135m --tokens 6    # a pretrained model

For each model and size of micro-batches: own samples outside the clip (a fraction) at the weights that
scored, and after one bit of one weight has changed, without and with the correction for rounding. Then
one update at each learning rate on half of the samples, and the clip decisions of the other half:
bfloat16, corrected, and float32 with the same weights. The correction sees one micro-batch at a time, so
its decisions depend on `--later-sizes`:

    python benchmarks/bf16_rounding.py tiny-a --tokens 8 --prompts 32 --sizes 16384 \
        --rates 1e-6 1e-5 3e-5 --later-sizes 100000 500 100
"""

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).parent))

from speed.shapes import make_policy, vocabulary_of
from speed.work import SETTINGS
from speed.workload import make_trace

from hacrl.algorithms.gspo import Gspo
from hacrl.config import AgentConfig
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.policy import Policy
from hacrl.policy.update import Loss, WithoutRounding
from hacrl.sampling.base import Request
from hacrl.types import Sample, Update

SIZES = (1, 512, 4096, 16384, 40960)
RATES = (1e-6, 5e-6)
GROUP = 8  # replies to a prompt
LOSS = Gspo(SETTINGS, (0.0, 1.0)).loss


@dataclass
class Replies:
    """Sampled replies with the sampler's log-probabilities."""

    prompts: list[tuple[int, ...]]
    replies: list[tuple[int, ...]]
    sampled: list[float]  # means

    @property
    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return list(zip(self.prompts, self.replies, strict=True))

    def samples(self, scores: list[list[float]]) -> list[Sample]:
        """Own samples with advantages of both signs."""
        return [
            Sample(
                problem_id=str(i // GROUP),
                index=i % GROUP,
                source="bench",
                is_own=True,
                token_ids=(*prompt, *reply),
                loss_mask=(0,) * len(prompt) + (1,) * len(reply),
                behaviour=fmean(score),
                old_logprobs=tuple(score),
                advantage=1.0 if i % 2 else -1.0,
            )
            for i, ((prompt, reply), score) in enumerate(zip(self.pairs, scores, strict=True))
        ]

    def noise(self, scores: list[list[float]]) -> float:
        """The rounding of one token, as training measures it (training/scoring.py)."""
        both = zip(scores, self.sampled, self.replies, strict=True)
        return fmean((fmean(s) - mean) ** 2 * len(r) for s, mean, r in both) ** 0.5


def load(what: str, device: torch.device) -> tuple[Policy, list[tuple[int, ...]]]:
    """The policy in bfloat16, and prompts."""
    fields = {"dtype": "bfloat16", "sampler_rows": 512}
    if not Path(what).is_dir():
        trace = make_trace("short", 64, vocabulary_of(what))
        return make_policy(what, device, **fields), list(trace.prompts)
    agent = AgentConfig(
        name="bench", model=what, learning_rate=1e-30, template="plain", **fields
    )  # prompts are not rendered, and a base model has no template
    policy = Policy(agent, device=str(device), temperature=1.0, beta=0.0)
    texts = [f"Question: What is {3 * i % 17} + {5 * i % 23}?\nAnswer:" for i in range(64)]
    ids = (policy.renderer.tokenizer(text).input_ids for text in texts)
    return policy, [tuple(prompt) for prompt in ids]


def draw(policy: Policy, prompts: Sequence[tuple[int, ...]], tokens: int) -> Replies:
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    requests = [Request(prompt, i, tokens) for i, prompt in enumerate(rows)]
    found = policy.sampler.sample(requests, 1.0)
    return Replies(rows, [r.token_ids for r in found], [fmean(r.logprobs) for r in found])


def outside(change: float) -> bool:
    return not -SETTINGS.epsilon_low <= math.expm1(change) <= SETTINGS.epsilon_high


def changes(policy: Policy, samples: Sequence[Sample], loss: Loss, half: int) -> list[float]:
    """log s of half of the samples in an update."""
    rows = [s for s in samples if int(s.problem_id) % 2 == half]
    update = Update(half, 0.8, "own", tuple(dict.fromkeys(s.problem_id for s in rows)))
    return [math.log(s) for s in policy.update(rows, loss, update).ratios if s is not None]


def exact_scores(policy: Policy, pairs: list) -> list[list[float]]:
    """Scores of the same weights, computed in float32."""
    own, policy.logprobs = policy.logprobs, LogProbs(copy.deepcopy(policy.model).float(), 1.0)
    try:
        return policy.score(pairs)
    finally:
        policy.logprobs = own


def fraction(found: Sequence[float]) -> str:
    return f"{fmean(map(outside, found)):.3f}"


def rms(values: Sequence[float]) -> str:
    return f"{fmean(v * v for v in values) ** 0.5:.1e}"


def without_a_change(policy: Policy, drawn: Replies, sizes: Sequence[int]) -> None:
    name = next(n for n in policy.master if "up_proj" in n)
    print("| tokens per micro-batch | same weights | one bit changed: rms, outside | corrected |")
    print("|---|---|---|---|")
    for size in sizes:
        policy.agent = policy.agent.model_copy(update={"microbatch_tokens": size})
        scores = policy.score(drawn.pairs)
        samples, corrected = drawn.samples(scores), WithoutRounding(LOSS, drawn.noise(scores))
        same = [c for half in (0, 1) for c in changes(policy, samples, LOSS, half)]
        with torch.no_grad():
            policy.master[name][0, 0] *= 1 + 2**-7
        policy._weights_changed()
        raw, left = (
            [c for half in (0, 1) for c in changes(policy, samples, loss, half)]
            for loss in (LOSS, corrected)
        )
        print(f"| {size} | {fraction(same)} | {rms(raw)}, {fraction(raw)} | {fraction(left)} |")


@torch.no_grad()
def rounding_of_a_token(policy: Policy, drawn: Replies) -> None:
    """How training measures the rounding of a token, and what an update makes of it: every weight moves
    by 1e-6 in a random direction, which changes few of the bfloat16 weights."""
    scores, exact = policy.score(drawn.pairs), exact_scores(policy, drawn.pairs)
    kept = {name: master.clone() for name, master in policy.master.items()}
    for master in policy.master.values():
        master += 1e-6 * torch.randn_like(master).sign()
    policy._weights_changed()
    found = []
    for before, after in (
        (scores, policy.score(drawn.pairs)),
        (exact, exact_scores(policy, drawn.pairs)),
    ):
        both = zip(before, after, strict=True)
        found.append(fmean((fmean(b) - fmean(a)) ** 2 * len(a) for b, a in both) ** 0.5)
    for name, master in policy.master.items():
        master.copy_(kept[name])
    policy._weights_changed()
    print(
        f"rounding of a token: {drawn.noise(scores):.1e} between sampler and trainer, {found[0]:.1e} "
        f"after a move of 1e-6 (in float32 {found[1]:.1e})\n"
    )


def after_an_update(policy: Policy, drawn: Replies, rate: float, sizes: Sequence[int]) -> None:
    """The weights stay moved: the updates of several rates follow one another."""
    scores, exact = policy.score(drawn.pairs), exact_scores(policy, drawn.pairs)
    samples = drawn.samples(scores)
    settings = {"learning_rate": rate, "microbatch_tokens": 16384}
    policy.agent = policy.agent.model_copy(update=settings)
    changes(policy, samples, WithoutRounding(LOSS), 0)
    moved = exact_scores(policy, drawn.pairs)
    policy.agent = policy.agent.model_copy(update={"learning_rate": 1e-30})
    corrected = WithoutRounding(LOSS, drawn.noise(scores))
    second = [i for i, s in enumerate(samples) if int(s.problem_id) % 2]
    true = [fmean(moved[i]) - fmean(exact[i]) for i in second]

    def other(values: Sequence[float]) -> str:
        apart = [outside(a) != outside(b) for a, b in zip(values, true, strict=True)]
        return f"{rms(values)}, {fraction(values)}, {fmean(apart):.3f}"

    for size in sizes:
        policy.agent = policy.agent.model_copy(update={"microbatch_tokens": size})
        raw, found = (other(changes(policy, samples, loss, 1)) for loss in (LOSS, corrected))
        print(f"| {rate:g} | {size} | {rms(true)}, {fraction(true)} | {raw} | {found} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", help="shapes of speed/shapes.py, or model folders")
    parser.add_argument("--tokens", type=int, default=180, help="longest reply")
    parser.add_argument("--prompts", type=int, default=64, help="of eight replies each")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument(
        "--later-sizes", type=int, nargs="+", default=[16384], help="micro-batches after an update"
    )
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for what in given.what:
        policy, prompts = load(what, device)
        drawn = draw(policy, prompts[: given.prompts], given.tokens)
        print(
            f"\n{what}: {len(drawn.replies)} replies, mean {fmean(map(len, drawn.replies)):.0f} tokens"
        )
        rounding_of_a_token(policy, drawn)
        without_a_change(policy, drawn, given.sizes)
        print(
            "\n| rate | tokens per micro-batch | float32: rms, outside "
            "| bfloat16: rms, outside, other decision | corrected |"
        )
        print("|---|---|---|---|---|")
        for rate in given.rates:
            after_an_update(policy, drawn, rate, given.later_sizes)


if __name__ == "__main__":
    main()
