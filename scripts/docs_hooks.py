"""Hooks of mkdocs: links to files outside docs/ become plain text; the site has only the pages."""

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """[benchmarks](../benchmarks/README.md) -> benchmarks (`benchmarks/README.md` in the repository)."""

    def plain(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return OUTSIDE.sub(plain, markdown)
