"""Make the small tokenizers of tests/text/tokenizers: `python scripts/make_test_tokenizers.py`.

Each has a property of real tokenizers; all are trained on the lines below.

bytes     byte-level BPE, ChatML turns, pad = end token, a marker that is not marked as special
spaces    SentencePiece style: a space before every stretch, byte fallback, BOS
narrow    like spaces, without byte fallback: letters outside its alphabet become <unk>
unigram   unigram model, a space only at the start, byte fallback, no chat template
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1] / "tests/text/tokenizers"
LINES = [
    "Question: What is 17 + 25? Answer: The answer is 42.",
    "We add the tens and the ones: 10 + 20 = 30 and 7 + 5 = 12, so the sum is 42.",
    "Let x be the number of apples. Then 3x + 4 = 19, so 3x = 15 and x = 5.",
    "There are 12 eggs in a dozen, and she sold 48 / 2 = 24 of them in May.",
    "user assistant system\nThink step by step.\n\nThe final answer is \\boxed{7}.\n",
    "the then there these other mother an and answer sum some number numbers step",
] * 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
)
BYTES = [f"<0x{b:02X}>" for b in range(256)]
DECODERS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def starts_with(bos: str) -> processors.TemplateProcessing:
    pair = f"{bos} $A {bos} $B"
    return processors.TemplateProcessing(f"{bos} $A", pair, special_tokens=[(bos, 1)])


def make_bytes() -> PreTrainedTokenizerFast:
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    t.train_from_iterator(LINES, trainer)
    t.add_tokens([AddedToken(s, normalized=False) for s in ("<think>", "</think>", "<|tool|>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHATML
    return fast


def make_spaces() -> PreTrainedTokenizerFast:
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    # Trained line by line without line breaks, so that those fall back to bytes.
    t.train_from_iterator([w for line in LINES for w in line.split("\n")], trainer)
    t = _unmark_bytes(t)
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    t.decoder = decoders.Sequence([*DECODERS, decoders.Strip(" ", 1, 0)])
    t.post_processor = starts_with("<s>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = INST
    return fast


def make_narrow() -> PreTrainedTokenizerFast:
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    t.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<eos>", "<turn>"], show_progress=False
    )
    t.train_from_iterator(LINES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}<turn>{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<turn>{% endif %}"
    )
    return fast


def make_unigram() -> PreTrainedTokenizerFast:
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=220,
        special_tokens=["<pad>", "<bos>", "<eos>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    t.train_from_iterator(LINES, trainer)
    spec = json.loads(t.to_str())
    spec["model"]["vocab"] += [[piece, -20.0] for piece in BYTES]
    spec["model"]["byte_fallback"] = True
    t = Tokenizer.from_str(json.dumps(spec))
    t.decoder = decoders.Sequence(DECODERS)
    t.post_processor = starts_with("<bos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=t,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def _unmark_bytes(t: Tokenizer) -> Tokenizer:
    """Byte pieces are ordinary words of the vocabulary, not added tokens."""
    spec = json.loads(t.to_str())
    spec["added_tokens"] = [a for a in spec["added_tokens"] if a["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(spec))


if __name__ == "__main__":
    for make in (make_bytes, make_spaces, make_narrow, make_unigram):
        make().save_pretrained(FOLDER / make.__name__.removeprefix("make_"))
