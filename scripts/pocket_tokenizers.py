"""The two tokenizers of the pocket team (see make_pocket_team.py)."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPEECH = [
    "You are a careful helper. Work the problem out step by step and give the number at the end.",
    "Answer the question of the user with one number; think before you answer.",
    "Add the units first, then the tens and the carry, so that the answer is right.",
]
"""Text for the merges; other text is encoded as bytes."""

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
    """Byte-level BPE as in GPT-2 and Qwen, one token per digit, ChatML turns."""
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
    """BPE in the style of SentencePiece: spaces are letters, unknown characters fall back to bytes, a
    BOS token, a space added before (and stripped from) a text that stands alone, numbers split into
    pieces of up to two digits."""
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
