"""Prompt templates: `str.format` over the columns of a data row, checked when the config is read."""

import re
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

from hacrl.errors import UserError

_FIELD = re.compile(r"(?P<name>[^.\[\]{}]+)(\[[^\[\]]+\])*")


class PromptTemplate:
    """The template of the user message.

    Example: PromptTemplate("Calculate {expression}.", "task.prompt").render({"expression": "4 + 3"})
    """

    def __init__(self, text: str, field: str) -> None:
        """`field` is the name of the setting, for error messages."""
        self.text = text
        self.field = field
        names = []
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise self._error(f"{error}; write a literal brace twice: {{{{ or }}}}") from error
        for _, name, spec, _ in parsed:
            if name is None:
                continue
            match = _FIELD.fullmatch(name)
            if match is None or name.isdigit() or "{" in (spec or ""):
                raise self._error(
                    f"{{{name}}} is not a column; name one, or write a literal brace twice"
                )
            names.append(match["name"])
        self.names = tuple(dict.fromkeys(names))
        if not self.names:
            raise self._error("it names no column, so every prompt would be the same")

    def check(self, columns: Iterable[str]) -> None:
        """UserError if the template names a column that does not exist."""
        existing = list(columns)
        for name in self.names:
            if name not in existing:
                raise self._error(f"no column {name!r}; the columns are: {', '.join(existing)}")

    def render(self, values: Mapping[str, Any], where: str = "this row") -> str:
        """The message for one row; `where` names the row in an error."""
        try:
            return self.text.format_map(values)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(f"cannot be filled in at {where}: {error!r}") from error

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.field} = {self.text!r}: {problem}")
