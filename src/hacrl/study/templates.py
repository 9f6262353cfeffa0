"""Texts from the templates (*.j2) of this package: reports, model cards, configs, reward functions."""

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Fill in a template, given by its path in this package. An unknown name in it is an error."""
    environment = Environment(
        loader=PackageLoader("hacrl.study", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["toml"] = toml
    return environment.get_template(template).render(values)


def toml(value: Any) -> str:
    """A string, number, list or dict as a TOML value on one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False)
