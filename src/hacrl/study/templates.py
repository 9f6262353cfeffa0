"""Texts from the templates (*.j2) of this package: reports, model cards, configs, reward functions."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key that needs no quotes


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
        names = (key if _BARE.fullmatch(key) else json.dumps(key) for key in value)
        inner = (f"{name} = {toml(item)}" for name, item in zip(names, value.values(), strict=True))
        return f"{{ {', '.join(inner)} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False)
