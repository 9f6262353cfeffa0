"""Make the pocket team: tiny models with a little arithmetic, ready to learn by RL on a CPU.

    python scripts/make_pocket_team.py                        the three, into the package
    python scripts/make_pocket_team.py wren --out /tmp/team   one of them, elsewhere
    python scripts/make_pocket_team.py goldfinch linnet wren-2 wren-3 wren-4 wren-5
                                                              the models of the suites

wren (Llama, tied embeddings) has a SentencePiece-like tokenizer, finch (Qwen3, grouped heads) and heron
(Llama) a byte-level one. All three reply in the same form, so that one agent's text is plausible to the
others: worked out ("7+8=15 2+5+1=8 so 85") or guessed ("so 83"). The last number of a reply is its
answer.

RL can only amplify what a model sometimes does. So each model is pretrained in two lessons, on training
problems only:
  1. the right procedure, every time, until it is known;
  2. briefly, demonstrations of mixed quality: the right procedure in 5 to 45 percent, otherwise slips (a
     carry forgotten or invented, a wrong digit, then continued correctly) or guesses. The fractions
     differ by agent and operation: wren is best at add, finch at sub, heron at mul, so that each can
     teach the others something.

Findings (GSPO alone, 32 prompts x 8, learning rate 3e-4, clip 3e-3, two updates per step; sampled
accuracy at temperature 1 on 120 held-out problems x 4, one seed):
  - How well the procedure is known limits RL. With a first lesson of 400 steps (64 percent right on
    held-out problems after it) wren went from 0.16 to 0.49 in 40 steps of RL; with 900 steps (89
    percent) and nearly the same habits from 0.21 to 0.82 in 30.
  - The models of the package, in 30 steps: wren 0.25 to 0.76, finch 0.25 to 0.85, heron 0.24 to 0.70.
    Products are worst (0.6 to 0.8 of the held-out ones right after the first lesson, 1.0 of the
    training ones): there are only 559 to learn from.
  - A second lesson of 100 steps left a stray byte in 3 to 6 percent of the replies; after 200 steps it
    is about 1 percent.

The other models are variants of the three (sampled accuracy at temperature 1 on 100 held-out problems
x 4 of each operation, as add / sub / mul; greedy on 100 in all):
  - goldfinch: finch's first lesson, then better habits: the same model after more training.
    0.49 / 0.60 / 0.36, greedy 0.95.
  - linnet: finch's architecture with other demonstrations; good at add where finch is good at sub.
    0.47 / 0.13 / 0.13, greedy 0.42.
  - wren-2 to wren-5: wren with a first lesson of 450, 250, 150 and 80 instead of 900 steps, so that RL
    cannot bring it up to the others. Means 0.19, 0.08, 0.04, 0.01, greedy 0.53, 0.35, 0.23, 0.04.

One thread, one seed: the same machine and versions give the same weights. Other processors may round
differently. About seven minutes for the three on one free core.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from pocket_tokenizers import byte_tokenizer, piece_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from hacrl.pocket import POCKET
from hacrl.tasks.arithmetic import OPERATIONS, ArithmeticTask, all_problems
from hacrl.types import Problem

HERE = Path(__file__).resolve().parent.parent / "src" / "hacrl" / "pocket"
REPLY_LIMIT = 24  # no demonstration is longer, in either tokenizer
ROWS = 192  # demonstrations in a batch
MIXED_STEPS = 200


def worked(problem: Problem, rng: random.Random, slip: str = "") -> str:
    """The school procedure, units first: "27+58" -> "7+8=15 2+5+1=8 so 85".

    A slip is one wrong step, then continued correctly: "carry" forgets or invents a carry, "units"
    gets the first result wrong by one.
    """
    operation, a, b = problem.id.split("-")
    tens, units, other = int(a) // 10, int(a) % 10, int(b)
    off = rng.choice((-1, 1)) if slip == "units" else 0
    if operation == "mul":
        first = abs(units * other + off)
        carry = first // 10
        if slip == "carry":
            carry = 0 if carry else rng.randint(1, 3)
        second = tens * other + carry
        steps = f"{units}*{other}={first} {tens}*{other}" + (f"+{carry}" if carry else "")
    else:
        sign = OPERATIONS[operation][0]
        wrap = 10 if operation == "sub" and units < other % 10 else 0
        first = abs(OPERATIONS[operation][1](units + wrap, other % 10) + off)
        carry = wrap // 10 if operation == "sub" else first // 10
        if slip == "carry":
            carry = 1 - carry
        second = OPERATIONS[operation][1](tens, other // 10)
        second += carry if operation == "add" else -carry
        if second < 0:  # an invented borrow would need a sign: slip in the units instead
            return worked(problem, rng, "units")
        steps = f"{units + wrap}{sign}{other % 10}={first} {tens}{sign}{other // 10}"
        steps += f"{sign}{carry}" if carry else ""
    return f"{steps}={second} so {second * 10 + first % 10}"


def guess(problem: Problem, rng: random.Random) -> str:
    """A wrong answer without work, close to the right one: "so 83"."""
    answer = int(problem.answer)
    near = [answer + d for d in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)]
    return f"so {rng.choice([n for n in near if n >= 0])}"


@dataclass(frozen=True)
class Habits:
    """Demonstrations of one operation: fractions of right work and of slips; the rest are guesses.

    Example: Habits(right=0.3, slip=0.3)
    """

    right: float
    slip: float


def demonstrate(problem: Problem, habits: Habits, rng: random.Random) -> str:
    """One demonstration of mixed quality."""
    kind = rng.random()
    if kind < habits.right:
        return worked(problem, rng)
    if kind < habits.right + habits.slip:
        return worked(problem, rng, rng.choice(("carry", "carry", "units")))
    return guess(problem, rng)


@dataclass(frozen=True)
class Member:
    """One model: tokenizer, architecture and pretraining.

    Example: see TEAM below.
    """

    tokenizer: str
    family: type[PretrainedConfig]
    body: dict[str, int]
    habits: dict[str, Habits]
    steps: int
    learning_rate: float
    stream: str = ""
    """Name of the model whose demonstrations it gets; empty: its own. With the same architecture and
    first lesson it is the same model after that lesson."""


def _body(hidden: int, intermediate: int, key_value_heads: int, **more: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_value_heads}
    return {**sizes, **heads, **more}


TEAM = {
    "wren": Member(
        tokenizer="pieces",
        family=LlamaConfig,
        body=_body(64, 160, 4, tie_word_embeddings=True),
        habits={"add": Habits(0.45, 0.30), "sub": Habits(0.15, 0.35), "mul": Habits(0.05, 0.35)},
        steps=900,
        learning_rate=6e-3,
    ),
    "finch": Member(
        tokenizer="bytes",
        family=Qwen3Config,
        body=_body(96, 256, 2, tie_word_embeddings=False, head_dim=24),
        habits={"add": Habits(0.05, 0.35), "sub": Habits(0.45, 0.30), "mul": Habits(0.15, 0.35)},
        steps=600,
        learning_rate=4e-3,
    ),
    "heron": Member(
        tokenizer="bytes",
        family=LlamaConfig,
        body=_body(128, 288, 4, tie_word_embeddings=False),
        habits={"add": Habits(0.15, 0.35), "sub": Habits(0.05, 0.35), "mul": Habits(0.45, 0.30)},
        steps=400,
        learning_rate=3e-3,
    ),
}

# The models of the suites: variants of the three.
RIGHT_ONLY = dict.fromkeys(OPERATIONS, Habits(right=1.0, slip=0.0))
BETTER = {"add": Habits(0.45, 0.35), "sub": Habits(0.55, 0.30), "mul": Habits(0.50, 0.30)}
OTHER = {"add": Habits(0.50, 0.30), "sub": Habits(0.03, 0.35), "mul": Habits(0.15, 0.35)}
TEAM["goldfinch"] = replace(TEAM["finch"], habits=BETTER, stream="finch")
TEAM["linnet"] = replace(TEAM["finch"], habits=OTHER)
for stage, steps in {"wren-2": 450, "wren-3": 250, "wren-4": 150, "wren-5": 80}.items():
    TEAM[stage] = replace(TEAM["wren"], steps=steps, stream="wren")


def build(member: Member, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained model that fits the tokenizer."""
    config = member.family(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
        **member.body,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@cache
def prompt_of(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The question as the model's chat template puts it, up to where the reply begins."""
    messages = [{"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def demonstrations(
    habits: dict[str, Habits], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """One batch (ids, labels) from the training problems, an equal part of each operation."""
    rows = []
    for row in range(ROWS):
        operation = tuple(OPERATIONS)[row % len(OPERATIONS)]
        problem = rng.choice(all_problems(operation, held_out=False))
        prompt = prompt_of(tokenizer, problem.messages[0].content)
        reply = demonstrate(problem, habits[operation], rng)
        rows.append((prompt, prompt + reply + str(tokenizer.eos_token)))
    # The prompt ends at a token boundary in both tokenizers, so its ids are a prefix.
    before = tokenizer([prompt for prompt, _ in rows], add_special_tokens=False)["input_ids"]
    whole = tokenizer([text for _, text in rows], add_special_tokens=False)["input_ids"]
    width = max(map(len, whole))
    ids = torch.full((ROWS, width), tokenizer.pad_token_id)
    labels = torch.full((ROWS, width), -100)
    for row, (prompt_ids, all_ids) in enumerate(zip(before, whole, strict=True)):
        assert all_ids[: len(prompt_ids)] == prompt_ids
        assert len(all_ids) - len(prompt_ids) <= REPLY_LIMIT
        ids[row, : len(all_ids)] = torch.tensor(all_ids)
        labels[row, len(prompt_ids) : len(all_ids)] = ids[row, len(prompt_ids) : len(all_ids)]
    return ids, labels


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    habits: dict[str, Habits],
    steps: int,
    learning_rate: float,
    rng: random.Random,
) -> None:
    """Supervised training on demonstrations: AdamW, warm-up, cosine decay to a twentieth."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        scale = 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = learning_rate * scale * min(1.0, step / 30)
        ids, labels = demonstrations(habits, tokenizer, rng)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            seconds = time.perf_counter() - begin
            print(f"  step {step}/{steps} loss {loss.item():.3f} {seconds:.0f} s", flush=True)


@torch.no_grad()
def accuracy(folder: Path, problems: list[Problem], samples: int, greedy: bool = False) -> float:
    """Fraction of replies whose last number is the answer, at temperature 1, from the saved folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [
        prompt_of(tokenizer, p.messages[0].content) for p in problems for _ in range(samples)
    ]
    rows = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left")
    ids = torch.tensor(rows["input_ids"])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.tensor(rows["attention_mask"]),
        max_new_tokens=REPLY_LIMIT,
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,
    )
    replies = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = 0
    for i, reply in enumerate(replies):
        numbers = "".join(c if c.isdigit() else " " for c in reply).split()
        right += numbers[-1:] == [problems[i // samples].answer]
    return right / len(replies)


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """An ordinary model folder; weights in bfloat16, to be loaded as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)


def report(root: Path, names: list[str], count: int) -> None:
    """The table: size, and sampled accuracy on held-out problems by operation."""
    head = f"{'model':10}{'params':>9}{'bytes':>9}" + "".join(f"{o:>7}" for o in OPERATIONS)
    print(head + f"{'mean':>7}{'greedy':>8}")
    for name in names:
        folder = root / name
        size = sum(f.stat().st_size for f in folder.iterdir())
        params = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
        torch.manual_seed(0)
        by_operation = [
            accuracy(folder, ArithmeticTask(0, (o,)).held_out(count), samples=4) for o in OPERATIONS
        ]
        greedy = accuracy(folder, ArithmeticTask(0).held_out(count), samples=1, greedy=True)
        print(f"{name:10}{params:9d}{size:9d}" + "".join(f"{x:7.3f}" for x in by_operation), end="")
        print(f"{sum(by_operation) / len(by_operation):7.3f}{greedy:8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("members", nargs="*", default=list(POCKET), help="which; default the three")
    parser.add_argument("--out", type=Path, default=HERE, help="where the folders go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--count", type=int, default=100, help="held-out problems in the table")
    args = parser.parse_args()
    if unknown := set(args.members) - set(TEAM):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(TEAM)}")
    torch.set_num_threads(args.threads)
    tokenizers = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}
    for name in args.members:
        member = TEAM[name]
        torch.manual_seed(args.seed)
        tokenizer = tokenizers[member.tokenizer]
        model = build(member, tokenizer)
        lessons = [
            ("the procedure", RIGHT_ONLY, member.steps, member.learning_rate),
            ("the habits", member.habits, MIXED_STEPS, member.learning_rate / 4),
        ]
        for title, habits, steps, learning_rate in lessons:
            print(f"{name}: {title}", flush=True)
            # A new stream for each lesson: one can be changed without changing the other.
            stream = random.Random(f"{args.seed} {member.stream or name}")
            teach(model, tokenizer, habits, steps, learning_rate, stream)
        save(args.out / name, model, tokenizer)
    report(args.out, args.members, args.count)


if __name__ == "__main__":
    main()
