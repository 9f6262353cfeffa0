"""What a user adds to a config on the command line: `key=value`, and `+arm` for a file of them.

`+gspo_x2` beside configs/paper/x.toml reads configs/paper/arms/gspo_x2.toml and lays its tables over
those of x.toml: a variant of many configs that needs more than one key is one word.
"""

from __future__ import annotations

import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

from hacrl.errors import UserError

ARMS = "arms"
"""The folder of overlays, beside the config file."""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def apply_override(tree: dict[str, Any], override: str, folder: Path) -> None:
    """Change the tree as one override says; `folder` is the config file's."""
    if override.startswith("+"):
        lay_over(tree, read_toml(_arm(override, folder)))
    else:
        set_key(tree, override)


def lay_over(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Tables are merged key by key; values and lists are replaced."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            lay_over(tree[key], value)
        else:
            tree[key] = value


def set_key(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key; an agent goes by its position or its name, all of them by `*`."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key=value, e.g. steps=100")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    _set(tree, key.split("."), value, override)


def _set(node: Any, path: list[str], value: Any, override: str) -> None:
    part, *rest = path
    if isinstance(node, list):
        places = range(len(node)) if part == "*" else [_position(node, part, override)]
        for place in places:
            if rest:
                _set(node[place], rest, value, override)
            else:
                node[place] = deepcopy(value)
    elif not isinstance(node, dict):
        where = ".".join(override.partition("=")[0].split(".")[: -len(path)])
        raise UserError(f"override {override!r}: {where} is a value, not a table")
    elif rest:
        _set(node.setdefault(part, {}), rest, value, override)
    else:
        node[part] = deepcopy(value)  # each agent its own: a later override may change one of them


def _arm(override: str, folder: Path) -> Path:
    name = override.removeprefix("+")
    path = folder / ARMS / f"{name}.toml"
    if not name or Path(name).name != name or not path.is_file():
        there = sorted(p.stem for p in (folder / ARMS).glob("*.toml"))
        known = f"there are: {', '.join('+' + n for n in there)}" if there else "there are none"
        raise UserError(f"override {override!r} names no file {path}; {known}")
    return path


def _position(items: list[Any], part: str, override: str) -> int:
    names = [item.get("name") for item in items if isinstance(item, dict)]
    if part.isdigit() and int(part) < len(items):
        return int(part)
    if part in names:
        return names.index(part)
    raise UserError(
        f"override {override!r}: there is no {part!r}; use 0 to {len(items) - 1}, one of {names}, "
        "or * for all"
    )


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """Return the first key whose values differ, with both values, or None if all are equal."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            found = first_difference(old.get(key), new.get(key), f"{where}.{key}".strip("."))
            if found:
                return found
        return None
    return None if old == new else f"{where} is {old!r} there and {new!r} here"
