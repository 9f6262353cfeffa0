"""Make the pocket team: tiny models with a little arithmetic, ready to learn by RL on a CPU.

    python scripts/make_pocket_team.py                        the three, into the package
    python scripts/make_pocket_team.py wren --out /tmp/team   one of them, elsewhere
    python scripts/make_pocket_team.py goldfinch linnet wren-2 wren-3 wren-4 wren-5
                                                              those of the suites

wren (Llama, tied embeddings) reads with a SentencePiece-like tokenizer, finch (Qwen3, grouped
heads) and heron (Llama) with a byte-level one. All three answer in the same form, so that one
agent's text is plausible to the others: worked out ("7+8=15 2+5+1=8 so 85") or guessed ("so 83").
The last number of a reply is its answer.

RL can only amplify what a model sometimes does. So each is taught in two lessons of supervised
training, on training problems only:
  1. the right procedure, every time, until it is known;
  2. briefly, demonstrations of mixed quality: the right procedure in 5 to 45 percent, otherwise
     slips (a carry forgotten or invented, a wrong digit, carried on faithfully) or plain guesses.
     The shares differ by agent and operation: wren is best at add, finch at sub, heron at mul, so
     that each has something to give to the others.

What was found on the way (GSPO alone, 32 prompts x 8, learning rate 3e-4, clip 3e-3, two updates a
step; sampled accuracy at temperature 1 on 120 held-out problems x 4, one seed):
  - How well the procedure is known decides what RL can reach. With a first lesson of 400 steps (64
    percent right on held-out problems after it) wren went from 0.16 to 0.49 in 40 steps of RL; with
    900 steps (89 percent) and nearly the same habits from 0.21 to 0.82 in 30.
  - The models as shipped, in 30 steps: wren 0.25 to 0.76, finch 0.25 to 0.85, heron 0.24 to 0.70.
    Products stay behind (0.6 to 0.8 of the held-out ones right after the first lesson, against 1.0
    of the training ones): there are just 559 of them to learn from.
  - A second lesson of 100 steps left 3 to 6 percent of replies with a stray byte in them; after
    200 steps it is about 1 percent.

The suites' models are one of the three, taught otherwise (sampled accuracy at temperature 1 on 100
held-out problems x 4 of each operation, as add / sub / mul; greedy on 100 in all):
  - goldfinch: finch's first lesson, then better habits: the same model after more training.
    0.49 / 0.60 / 0.36, greedy 0.95.
  - linnet: finch's body and a stream of its own; good at add where finch is good at sub.
    0.47 / 0.13 / 0.13, greedy 0.42.
  - wren-2 to wren-5: wren, with the first lesson broken off after 450, 250, 150 and 80 of 900 steps,
    so that RL cannot bring it up to the others. Means 0.19, 0.08, 0.04, 0.01, greedy 0.53, 0.35, 0.23,
    0.04.

One thread, one seed: the same machine and versions give the same weights. Other processors may
round differently and give models that differ in detail. About seven minutes for the three on one
free core.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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

# ------------------------------------------------------------------------------------------------
# Demonstrations: what a reply looks like, right and wrong
# ------------------------------------------------------------------------------------------------


def worked(problem: Problem, rng: random.Random, slip: str = "") -> str:
    """The procedure of school, units first: "27+58" -> "7+8=15 2+5+1=8 so 85".

    A slip is one wrong step, carried on faithfully: "carry" forgets the carry (or invents one),
    "units" gets the first result wrong by one.
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
    """A confident answer without work, near the truth but not it: "so 83"."""
    answer = int(problem.answer)
    near = [answer + d for d in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)]
    return f"so {rng.choice([n for n in near if n >= 0])}"


@dataclass(frozen=True)
class Habits:
    """How an agent was taught one operation: shares of right work and of slips; the rest guesses.

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


# ------------------------------------------------------------------------------------------------
# Two tokenizers
# ------------------------------------------------------------------------------------------------

SPEECH = [
    "You are a careful helper. Work the problem out step by step and give the number at the end.",
    "Answer the question of the user with one number; think before you answer.",
    "Add the units first, then the tens and the carry, so that the answer is right.",
]
"""A few words for the merges; any other text falls apart into bytes and comes back whole."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BRACKETS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}<sys>{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<q>{{ message['content'] }}"
    "{% else %}<a>{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A: byte-level BPE as in GPT-2 and Qwen, every digit a token of its own, ChatML turns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    turns = ["user\n", "assistant\n", "system\n", "so ", " so "] * 50
    tokenizer.train_from_iterator(turns + SPEECH, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """B: BPE in the manner of SentencePiece: spaces are letters, unknown characters fall back to
    bytes, a BOS token, a space put before (and stripped from) a text that stands alone; numbers
    are read in pieces of up to two digits."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "<sys>", "<q>", "<a>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581"] + [chr(c) for c in range(33, 127)]
    merges: list[tuple[str, str]] = []
    digits = [(a, b) for a in "0123456789" for b in "0123456789"]
    for pair in [*digits, ("s", "o"), ("\u2581", "so"), ("t", "h"), ("\u2581", "th"), ("e", "r")]:
        merges.append(pair)
        pieces.append("".join(pair))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="first", split=True),
            pre_tokenizers.Split(Regex("[0-9]{1,2}"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<sys>", "<q>", "<a>"],
        chat_template=BRACKETS,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


# ------------------------------------------------------------------------------------------------
# Three models
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """All that makes one model: its body, its tokenizer, and how it was taught.

    Example: see TEAM below.
    """

    tokenizer: str
    family: type[PretrainedConfig]
    body: dict[str, int | bool]
    habits: dict[str, Habits]
    steps: int
    learning_rate: float
    stream: str = ""
    """Whose stream of demonstrations it is taught with; its own where empty. With the same body and
    the same first lesson it is the same model up to there."""


TEAM = {
    "wren": Member(
        tokenizer="pieces",
        family=LlamaConfig,
        body={
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        habits={"add": Habits(0.45, 0.30), "sub": Habits(0.15, 0.35), "mul": Habits(0.05, 0.35)},
        steps=900,
        learning_rate=6e-3,
    ),
    "finch": Member(
        tokenizer="bytes",
        family=Qwen3Config,
        body={
            "hidden_size": 96,
            "head_dim": 24,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
        habits={"add": Habits(0.05, 0.35), "sub": Habits(0.45, 0.30), "mul": Habits(0.15, 0.35)},
        steps=600,
        learning_rate=4e-3,
    ),
    "heron": Member(
        tokenizer="bytes",
        family=LlamaConfig,
        body={
            "hidden_size": 128,
            "intermediate_size": 288,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        habits={"add": Habits(0.15, 0.35), "sub": Habits(0.05, 0.35), "mul": Habits(0.45, 0.30)},
        steps=400,
        learning_rate=3e-3,
    ),
}

# The suites' further models: one of the three, taught otherwise.
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


# ------------------------------------------------------------------------------------------------
# Teaching
# ------------------------------------------------------------------------------------------------


@cache
def prompt_of(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The question as the model's chat template puts it, up to where the reply begins."""
    messages = [{"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


@dataclass(frozen=True)
class Lesson:
    """One stretch of supervised training.

    Example: Lesson(member.habits, steps=200, learning_rate=1e-3)
    """

    habits: dict[str, Habits]
    steps: int
    learning_rate: float


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
    # The end of the prompt is a token boundary in both tokenizers (a control token, or the end of
    # a control token's line), so the reply's ids are what follows the prompt's.
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


def lessons(member: Member) -> dict[str, Lesson]:
    """First the right procedure alone, until it is known by heart; then, briefly and gently, the
    mixture, so that it is rarely used."""
    right_only = dict.fromkeys(OPERATIONS, Habits(right=1.0, slip=0.0))
    return {
        "the procedure": Lesson(right_only, member.steps, member.learning_rate),
        "the habits": Lesson(member.habits, MIXED_STEPS, member.learning_rate / 4),
    }


def teach(
    lesson: Lesson, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> None:
    """Supervised training on the demonstrations: AdamW, warm-up, cosine to a twentieth."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    begin = time.perf_counter()
    for step in range(1, lesson.steps + 1):
        scale = 0.05 + 0.475 * (1 + math.cos(math.pi * step / lesson.steps))
        optimizer.param_groups[0]["lr"] = lesson.learning_rate * scale * min(1.0, step / 30)
        ids, labels = demonstrations(lesson.habits, tokenizer, rng)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == lesson.steps:
            seconds = time.perf_counter() - begin
            print(
                f"  step {step}/{lesson.steps} loss {loss.item():.3f} {seconds:.0f} s", flush=True
            )


# ------------------------------------------------------------------------------------------------
# Measuring and saving
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(folder: Path, problems: list[Problem], samples: int, greedy: bool = False) -> float:
    """Share of replies whose last number is the answer, at temperature 1, from the saved folder."""
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
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TEAM)}")
    torch.set_num_threads(args.threads)
    tokenizers = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}
    for name in args.members:
        member = TEAM[name]
        torch.manual_seed(args.seed)
        tokenizer = tokenizers[member.tokenizer]
        model = build(member, tokenizer)
        for title, lesson in lessons(member).items():
            print(f"{name}: {title}", flush=True)
            # Each lesson begins its own stream: one can be changed without touching the other.
            stream = random.Random(f"{args.seed} {member.stream or name}")
            teach(lesson, model, tokenizer, stream)
        save(args.out / name, model, tokenizer)
    report(args.out, args.members, args.count)


if __name__ == "__main__":
    main()
