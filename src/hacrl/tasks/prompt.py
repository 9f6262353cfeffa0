"""Prompt templates: `str.format` over the columns of a data row, checked when the config is read."""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from hacrl.errors import UserError

_FIELD = re.compile(r"(?!\d+$)[^.\[\]{}]+(\[[^\[\]]+\])*")


class PromptTemplate:
    """The template of the user message.

    Example: PromptTemplate("Add {a}.", "task.prompt").render({"a": "4 + 3"}, "train.jsonl, line 7")
    """

    def __init__(self, text: str, field: str) -> None:
        """`field` is the name of the setting, for error messages."""
        self.text = text
        self.field = field
        try:
            parsed = [(name, spec or "") for _, name, spec, _ in Formatter().parse(text)]
        except ValueError as error:
            raise self._error(f"{error}; write a literal brace twice: {{{{ or }}}}") from error
        fields = [(name, spec) for name, spec in parsed if name is not None]
        for name, spec in fields:
            if not _FIELD.fullmatch(name) or "{" in spec:
                raise self._error(
                    f"{{{name}}} is not a column; name one, or write a literal brace twice"
                )
        if not fields:
            raise self._error("it names no column, so every prompt would be the same")

    def render(self, values: Mapping[str, Any], where: str) -> str:
        """The message for one row; `where` names the row in an error."""
        try:
            return self.text.format_map(values)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(
                f"cannot be filled in at {where}: {error!r}; the columns are: {', '.join(values)}"
            ) from error

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.field} = {self.text!r}: {problem}")
