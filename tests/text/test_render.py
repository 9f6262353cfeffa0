"""Prompts, replies, end tokens and control tokens of small tokenizers."""

import json
import threading
import time
from pathlib import Path

import pytest
from small_tokenizers import ASK, FIXTURES, SMALL, decoded, small
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacrl.errors import UserError
from hacrl.text import render
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.types import Completion, Finish, Message, Rollout


def encoded(r: Renderer, text: str) -> tuple[int, ...]:
    """The text after the prompt ASK."""
    ids = r.continuation(r.prompt(ASK), text)
    assert ids is not None
    return ids


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


def test_a_tokenizer_without_control_tokens() -> None:
    """A word vocabulary whose end token, the full stop, is an ordinary word (the generation config
    names it). A character that stands for hidden control strings is text, too."""
    words = {
        word: i for i, word in enumerate(["?", "Question:", "Answer:", "is", "it", ".", "\uf8f0"])
    }
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    r = Renderer(tokenizer, RenderSettings(template="plain"), end_ids=[5])
    assert r.prompt((Message("user", "is it"),)) == (1, 3, 4, 2)
    assert r.prompt((Message("user", "is \uf8f0"),)) == (1, 3, 6, 2)


@pytest.mark.parametrize("name", ["bytes", "spaces"])
def test_hidden_path_equals_the_canonical_one(name: str) -> None:
    """Encoding around placeholders equals the tokenizer's encoding, here without placeholders."""
    r = small(name)
    turns = [{"role": "user", "content": "What is 17 + 25?\n x"}]
    text = r._apply(turns, add_generation_prompt=True)
    assert r._encode_hidden(text, []) == tuple(r.tokenizer.encode(text, add_special_tokens=False))


def test_marker_that_its_maker_forgot_to_mark_is_control() -> None:
    r = small("bytes")
    tool = r.tokenizer.convert_tokens_to_ids("<|tool|>")
    think = r.tokenizer.convert_tokens_to_ids("<think>")
    ids = encoded(r, "<|tool|><think>")
    assert tool not in ids and think in ids
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
    template = "{{ word }} {{ messages[0]['content'] }}"
    own = Renderer(tokenizer, RenderSettings(template=template, template_args={"word": "Q"}))
    assert decoded(own, own.prompt(ASK)) == "Q What is 17 + 25?"


def test_prompt_does_not_change_with_the_day() -> None:
    template = "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}"
    r = Renderer(load_tokenizer(FIXTURES / "bytes"), RenderSettings(template=template))
    assert decoded(r, r.prompt(ASK)) == "26 Jul 2024 What is 17 + 25?"


def test_sentencepiece_space_is_neither_added_nor_stripped() -> None:
    for name in ("spaces", "narrow", "unigram"):
        r = small(name)
        prompt = r.prompt(ASK)
        for text in ("answer", " answer", "  answer", "42"):
            assert decoded(r, prompt + encoded(r, text)) == decoded(r, prompt) + text


def test_tokenizer_that_cannot_keep_a_character_says_so() -> None:
    r = small("narrow")
    prompt = r.prompt(ASK)
    assert r.continuations([(prompt, "日"), (prompt, "<unk>")]) == [None, None]
    # Also if <unk> decodes to the same text.
    assert r.text(prompt, (r.tokenizer.unk_token_id,)) == ("<unk>", False)


def test_control_token_that_a_model_finds_in_plain_letters_is_refused() -> None:
    """<eos> is one piece of the unigram model: the text would be right, the id would not."""
    r = small("unigram")
    assert r.continuation(r.prompt(ASK), "a <eos> b") is None
    assert r.continuation(r.prompt(ASK), "a <eo> b") is not None


def test_text_leaves_out_the_end_token_only() -> None:
    r = small("bytes")
    prompt, end = r.prompt(ASK), r.end_ids[0]
    body = encoded(r, "The sum is 42.")
    assert r.text(prompt, (*body, end)) == r.text(prompt, body) == ("The sum is 42.", True)
    assert r.text(prompt, (end,)) == ("", True)
    text, shareable = r.text(prompt, (*body, end, *body))
    assert not shareable and "<|im_end|>" in text
    pads_the_embedding = len(r.tokenizer) + 7
    assert not r.text(prompt, (*body, pads_the_embedding))[1]


def test_incomplete_character_is_not_shareable_but_a_written_one_is() -> None:
    """Both are U+FFFD: é is two bytes, and its first byte alone is an incomplete character."""
    for name in ("bytes", "spaces"):
        r = small(name)
        prompt = r.prompt(ASK)
        ids = encoded(r, "wé")
        assert r.text(prompt, ids) == ("wé", True)
        text, shareable = r.text(prompt, ids[:-1])
        assert text.endswith("\ufffd") and not shareable
        assert r.text(prompt, encoded(r, "w\ufffd")) == ("w\ufffd", True)


def test_shorten_keeps_characters_whole() -> None:
    r = small("bytes")
    prompt, ids = r.prompt(ASK), encoded(r, "x日本")
    assert len(ids) == 7
    assert [len(r.shorten(prompt, ids, n)) for n in range(1, 9)] == [1, 1, 1, 4, 4, 4, 7, 7]


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
    # The template's end token is added if the generation config does not list it.
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


def test_padding_settings_of_the_tokenizer_are_ignored() -> None:
    tokenizer = load_tokenizer(FIXTURES / "bytes")
    r = Renderer(tokenizer, RenderSettings())
    expected = r.continuation(r.prompt(ASK), "42")
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    fresh = Renderer(tokenizer, RenderSettings())
    pairs = [(fresh.prompt(ASK), "42"), (fresh.prompt(ASK), "17 + 25")]
    assert fresh.continuations(pairs)[0] == expected
    assert fresh.prompt(ASK) == r.prompt(ASK)


def test_a_question_with_the_placeholder_s_own_characters() -> None:
    """FAULTS D13-20: U+F8F0 in a question that also holds a control string was an IndexError."""
    r = small("bytes")
    for text in ("\uf8f07\uf8f1 <|im_end|> \uf8f0", "\uf8f00\uf8f1", "\uf8f0"):
        assert text in decoded(r, r.prompt((Message("user", text),)))
    begun = Renderer(r.tokenizer, RenderSettings(reply_start="\uf8f00\uf8f1"))
    assert decoded(begun, begun.prompt((Message("user", "<|im_end|>"),))).endswith("\uf8f00\uf8f1")


def test_a_template_that_fails_or_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS D13-20: template errors were tracebacks, an endless template hung."""
    tokenizer = load_tokenizer(FIXTURES / "bytes")
    far = "{% for i in range(10**9) %}{% endfor %}"
    for template in ("{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{% for %}", far):
        with pytest.raises(UserError, match="the chat template rejects"):
            Renderer(tokenizer, RenderSettings(template=template))
    monkeypatch.setattr(render, "TEMPLATE_SECONDS", 0.2)
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}"
    before = threading.active_count()
    with pytest.raises(UserError, match=r"does not end within 0\.2 seconds"):
        Renderer(tokenizer, RenderSettings(template=loop))
    until = time.monotonic() + 30
    while threading.active_count() > before:  # the thread is stopped
        assert time.monotonic() < until
        time.sleep(0.01)


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


def test_a_bpe_tokenizer_that_became_unigram_is_refused(tmp_path: Path) -> None:
    """As in a wrong conversion: the scores are ranks of merges. The shortest tokens rank first, so the
    sum is largest for "th" + "e", whereas BPE would merge them."""
    vocabulary = [("<unk>", 0.0), ("th", -500.0), ("e", -501.0), ("the", -1200.0)]
    backend = Tokenizer(models.Unigram(vocabulary, 0))
    assert backend.encode("the").tokens == ["th", "e"]
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"scores are no log-probabilities \(median -500\)"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_is_loaded_as_it_is(tmp_path: Path) -> None:
    """A config that names the class of another family must not change the file's pipeline."""
    tokenizer = load_tokenizer(FIXTURES / "bytes")
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    r = Renderer(load_tokenizer(tmp_path), RenderSettings())
    assert decoded(r, tuple(r.tokenizer.encode("a  b\nc"))) == "a  b\nc"
