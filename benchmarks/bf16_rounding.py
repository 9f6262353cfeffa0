"""How rounding in bfloat16 changes a sequence's ratio, and GSPO's clip decisions.

    python benchmarks/bf16_rounding.py shapes Qwen3-0.6B,Qwen3-1.7B   # random weights, on a GPU
    python benchmarks/bf16_rounding.py model FOLDER --tokens 60 --rate 1e-6   # a pretrained model

`shapes` prints own samples outside the clip for updates that move no weight, and the agreement with
float32 after one update at 1e-6. `model` moves every weight by `--rate` in a random direction, and
compares the change of the mean log-probability of sampled replies in bfloat16 and in float32.
"""

import argparse
import copy
import math
import sys
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from speed.shapes import make_policy, vocabulary_of
from speed.work import SETTINGS, _random_replies, _samples
from speed.workload import make_trace

from hacrl.algorithms.gspo import Gspo
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.policy import Policy
from hacrl.policy.update import WithoutRounding
from hacrl.types import Update

MICROBATCHES = (4096, 40960)
LOSS = Gspo(SETTINGS, (0.0, 1.0)).loss
Scores = list[list[float]]


def outside(log_ratio: float) -> bool:
    return not -SETTINGS.epsilon_low <= math.expm1(log_ratio) <= SETTINGS.epsilon_high


def rms(values: list[float]) -> float:
    return fmean(v * v for v in values) ** 0.5


def compare(name: str, found: list[float], exact: list[float]) -> None:
    apart = fmean(outside(a) != outside(b) for a, b in zip(found, exact, strict=True))
    print(
        f"{name}: outside the clip {fmean(map(outside, found)):.3f}, in float32 "
        f"{fmean(map(outside, exact)):.3f}, other decision {apart:.3f}; rms of the change "
        f"{rms(found):.1e}, in float32 {rms(exact):.1e}, of its error "
        f"{rms([a - b for a, b in zip(found, exact, strict=True)]):.1e}",
        flush=True,
    )


def exact_scores(policy: Policy, sequences: list) -> Scores:
    """Scores of the same weights, computed in float32."""
    own, policy.logprobs = policy.logprobs, LogProbs(copy.deepcopy(policy.model).float(), 1.0)
    try:
        return policy.score(sequences)
    finally:
        policy.logprobs = own


def shapes(names: str, prompts: int, scale: float) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in names.split(","):
        trace = make_trace("short", prompts, vocabulary_of(shape), scale=scale)
        replies = _random_replies(trace, vocabulary_of(shape))
        sequences = [(p, r) for (p, _), r in zip(trace.rows, replies, strict=True)]
        problems = tuple(str(i) for i in range(len(trace.lengths)))
        policy = make_policy(shape, device)

        def update(half: int, scores: Scores, loss, policy=policy, trace=trace, replies=replies):
            rows = _samples(trace, replies, scores)
            rows = [s for s in rows if int(s.problem_id) % 2 == half]
            return policy.update(rows, loss, Update(half, 0.8, "own", problems))  # noqa: B023

        for tokens in MICROBATCHES:
            policy.agent = policy.agent.model_copy(update={"microbatch_tokens": tokens})
            scores = policy.score(sequences)
            for half in (0, 1):
                report = update(half, scores, LOSS)
                ratios = [math.log(r) for r in report.ratios if r is not None]
                print(
                    f"{shape}, rate 0, micro-batches of {tokens}, update {half + 1}: outside the clip "
                    f"{fmean(map(outside, ratios)):.4f}, norm {report.grad_norm:.2g}",
                    flush=True,
                )
        policy.agent = policy.agent.model_copy(
            update={"microbatch_tokens": 16384, "learning_rate": 1e-6}
        )
        before, before32 = policy.score(sequences), exact_scores(policy, sequences)
        update(0, before, WithoutRounding(LOSS))
        after, after32 = policy.score(sequences), exact_scores(policy, sequences)
        second = [
            i for i, s in enumerate(_samples(trace, replies, before)) if int(s.problem_id) % 2
        ]
        found, exact = (
            [fmean(b[i]) - fmean(a[i]) for i in second]
            for a, b in ((before, after), (before32, after32))
        )
        gaps = [(fmean(a) - fmean(b)) ** 2 for a, b in zip(before, before32, strict=True)]
        explained = min(1.0, 2 * fmean(gaps) / fmean(d * d for d in found))
        compare(f"{shape}, rate 1e-6, second update, bfloat16", found, exact)
        compare("  without rounding", [(1 - explained) * d for d in found], exact)
        del policy


@torch.no_grad()
def model(folder: str, tokens: int, replies: int, rate: float) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    master = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [f"Question: What is {3 * i % 17} + {5 * i % 23}?\nAnswer:" for i in range(replies)]
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    rows = [bos + tokenizer(t, add_special_tokens=False).input_ids for t in texts]
    prompt = min(map(len, rows))
    ids = torch.tensor([row[-prompt:] for row in rows])
    torch.manual_seed(0)
    ids = master.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0
    )
    moved = copy.deepcopy(master)
    for parameter in moved.parameters():
        parameter += rate * torch.randn_like(parameter).sign()

    def mean_logprob(weights: torch.nn.Module, dtype: torch.dtype) -> Tensor:
        """At the weights rounded to bfloat16, computed in `dtype`."""
        used = copy.deepcopy(weights).to(torch.bfloat16).to(dtype)
        logits = used(ids, use_cache=False).logits[:, prompt - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(2, ids[:, prompt:, None])
        return chosen.squeeze(-1).double().mean(1)

    found, exact = (
        (mean_logprob(moved, d) - mean_logprob(master, d)).tolist()
        for d in (torch.bfloat16, torch.float32)
    )
    compare(f"{Path(folder).name}, {tokens} tokens, rate {rate:g}, bfloat16", found, exact)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["shapes", "model"])
    parser.add_argument("what", help="shapes of benchmarks/speed/shapes.py, or a model folder")
    parser.add_argument("--prompts", type=int, default=64, help="of eight replies each (shapes)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the replies' lengths (shapes)")
    parser.add_argument("--tokens", type=int, default=60, help="of a reply (model)")
    parser.add_argument("--replies", type=int, default=16, help="(model)")
    parser.add_argument("--rate", type=float, default=1e-6, help="(model)")
    given = parser.parse_args()
    if given.kind == "shapes":
        shapes(given.what, given.prompts, given.scale)
    else:
        model(given.what, given.tokens, given.replies, given.rate)


if __name__ == "__main__":
    main()
