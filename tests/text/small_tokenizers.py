"""Small tokenizers of every kind, and decoding without code of hacrl."""

from functools import cache
from pathlib import Path

from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.types import Message

FIXTURES = Path(__file__).parent / "tokenizers"
SMALL = ("bytes", "spaces", "narrow", "unigram")
ASK = (Message("user", "What is 17 + 25?"),)


@cache
def small(name: str) -> Renderer:
    tokenizer = load_tokenizer(FIXTURES / name)
    template = None if tokenizer.chat_template else "plain"
    return Renderer(tokenizer, RenderSettings(template=template))


def decoded(renderer: Renderer, ids: tuple[int, ...]) -> str:
    """Decoded by transformers, without code of hacrl."""
    return renderer.tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
