"""Hooks of mkdocs: links to files outside docs/ become text, links that show a file name show the
page's title, and no page may load external files."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ABOVE = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")
NAMED = re.compile(r"\[`?(?:[\w-]+/)*[\w-]+\.md`?\]\(((?:[\w.-]+/)*[\w-]+\.md)(#[^)]*)?\)")
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\s>]+"
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """[benchmarks](../benchmarks/README.md) -> benchmarks (`benchmarks/README.md`), and
    [tasks.md](tasks.md) -> [Tasks and verifiers](tasks.md)."""

    folder, docs = Path(page.file.abs_src_path).parent, Path(page.file.src_dir).resolve()

    def titled(match: re.Match[str]) -> str:
        target = folder / match[1]
        title = target.read_text(encoding="utf-8").split("\n", 1)[0] if target.is_file() else ""
        return f"[{title[2:]}]({match[1]}{match[2] or ''})" if title[:2] == "# " else match[0]

    def plain(match: re.Match[str]) -> str:
        text, up, path, _ = match.groups()
        if (folder / up / path).resolve().is_relative_to(docs):
            return match[0]
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return NAMED.sub(titled, ABOVE.sub(plain, markdown))


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Stop the build if a page loads a script, style, image or font from another host."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads a file from another host: {found.group()}")
