"""The console of all output: text is shown as it is, without markup and control characters."""

from typing import Any

from rich.console import Console
from rich.text import Text

from hacrl.safe_text import printable


class PlainConsole(Console):
    """A rich console for untrusted text (ids, questions, replies, error messages): `[bold]`, `:smile:`
    and terminal codes in a string have no effect. Styles are given as arguments or as `Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
