"""The blocks of a report; they know nothing of Markdown or HTML."""

from __future__ import annotations

from dataclasses import dataclass

from hacrl.study.compare.results import Band


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Listing:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The first `words` columns are text, the rest figures."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2


@dataclass(frozen=True)
class Chart:
    """Learning curves of one agent, a line for each arm."""

    title: str
    lines: tuple[tuple[str, tuple[Band, ...]], ...]


Block = Heading | Paragraph | Listing | Grid | Chart
