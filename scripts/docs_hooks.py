"""Hooks of mkdocs: links to files outside docs/ become text, and no page may load external files."""

import re
from typing import Any

from mkdocs.exceptions import PluginError

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)]+)\)")
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\s>]+"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """[benchmarks](../benchmarks/README.md) -> benchmarks (`benchmarks/README.md`)."""

    def plain(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return OUTSIDE.sub(plain, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Stop the build if a page loads a script, style, image or font from another host."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads a file from another host: {found.group()}")
