"""Text that leaves the process: secrets are masked, control characters are escaped.

A secret is text under a key whose name contains token, key, password or secret (but not tokens, keys),
or the user and password of a URL. Messages, reports and uploads show *** instead, and a config file
that holds one can be read by its owner only.
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET = r"(?:token(?!s)|key(?!s)|passw(?:or)?d|secret)"
_NAME = re.compile(_SECRET, re.IGNORECASE)
_USER = re.compile(r"(?<=\w://)[^/\s'\"@]+(?=@)")
_ASSIGNED = re.compile(
    rf"([\w.-]*{_SECRET}[\w.-]*(?:\s*=|['\"]\s*:)\s*)(?!value\b)(\"[^\"]*\"|'[^']*'|[^\s,;}}\]]+)",
    re.IGNORECASE,
)
"""Assignments to a secret, except `key=value` of error messages."""
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters except tab and line feed, marks that change the direction of text, and
surrogates, which cannot be encoded."""


def printable(text: str) -> str:
    """The text with control characters as escapes, e.g. ESC as \\x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def plural(number: float, noun: str) -> str:
    """Number and noun, e.g. "1 prompt" or "3 prompts"."""
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def mask(value: Any, key: str = "") -> Any:
    """A copy of plain data (dicts, lists, values) without secrets; `key` is the name of the value."""
    if isinstance(value, Mapping):
        return {name: mask(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(item, key) for item in value]
    if not isinstance(value, str):
        return value
    return MASK if value and _NAME.search(key) else mask_text(value)


def mask_text(text: str) -> str:
    """A message, or the text of a config, without secrets.

    Example: mask_text("sampler.options.api_key=abc") == "sampler.options.api_key=***"
    """
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(MASK, text))


def mask_override(text: str) -> str:
    """An override `key=value` without secrets; the value may contain spaces."""
    key, equals, value = text.partition("=")
    return mask_text(f"{key}={mask(value, key)}" if equals else text)


def has_secret(text: str) -> bool:
    """Whether the text of a config holds a secret."""
    return mask_text(text) != text
