"""Reading a config: the TOML file, overrides from the command line, and readable errors.

An override is `key=value`, or `+arm` for a file of them: for configs/paper/x.toml, `+gspo_x2` reads
configs/paper/arms/gspo_x2.toml and merges its tables into those of x.toml.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from hacrl.algorithms import ALGORITHMS, algorithm_class
from hacrl.errors import UserError
from hacrl.importing import add_folder
from hacrl.safe_text import mask, mask_override

if TYPE_CHECKING:
    from hacrl.config import Config

Overrides = Sequence[str] | Mapping[str, Any]
"""Changes of a config: `key=value` texts as on the command line, or dotted key -> value."""
ARMS = "arms"  # the folder with arm files, in the folder of the config file
MAX_DEPTH = 20  # most levels of tables and lists in a config

RENAMED: dict[str, str] = {
    "pool": "no longer exists: trajectories are files in RUN/pool; delete the table [pool]",
    "task.held_out_share": "write task.held_out_fraction",
    "agents.prune": "no longer exists: samples of advantage 0 are always skipped; delete the key",
    "sampler.cache_share": "write sampler.cache_fraction",
    "algorithm.sgt_lambda": "write algorithm.imitation_weight",
    "algorithm.graft_threshold": "write algorithm.threshold",
    "algorithm.graft_cap": "write algorithm.cap",
    "algorithm.tis_kl_threshold": "write algorithm.kl_threshold",
    "algorithm.overlap_power": "write algorithm.power",
    "algorithm.overlap_tokens": "write algorithm.ratio_tokens",
    "algorithm.overlap_follow": "write algorithm.follow",
    "agents.frozen": "unknown key; write learn = false",
    "agents.away": "no longer exists; delete the key",
    "agents.learn_steps": "no longer exists; delete the key",
    "sampler.behaviour": "no longer exists: scores are always the trainer's; delete the key",
    "sampler.check_samples": "no longer exists; delete the key",
    "skip_limit": "no longer exists: the limit is 5; delete the key",
    "trust.max_source_norm": "no longer exists; use trust.max_source_weight",
    "trust.false_alarm_steps": "no longer exists: it is 10000; delete the key",
    "budget": "no longer exists: rollouts are equal in all arms; delete the key",
    "trust.quarantine_steps": "no longer exists: it is 20; delete the key",
}
"""Dotted name of a key that was renamed or removed, or is often guessed -> what to write instead.
Numbers in the name of a key, such as agents.0, are left out."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file in UTF-8, with or without a byte order mark."""
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {problem}. Give a TOML file; `hacrl init` writes a config.")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    check_values(tree, str(path))
    return tree


def check_values(value: Any, where: str, depth: int = 0) -> None:
    """Raise a UserError for nan, infinities, integers of more than 64 bits and deep nesting, wherever
    they are in a tree; free tables such as sampler.options have no other check. `where` begins the
    message."""
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: more than {MAX_DEPTH} levels of tables and lists")
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_values(item, f"{where}{'.' if depth else ': '}{key}", depth + 1)
    elif isinstance(value, float) and not isfinite(value):
        raise UserError(f"{where}: {value} is not a finite number; give one")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{where}: the number is too large; give one of at most 64 bits")


def resolve_imports(tree: dict[str, Any], base: Path) -> dict[str, Any]:
    """A copy of the tree in which import paths of modules in `base` have their folder."""
    tree = deepcopy(tree)
    for table, key in import_tables(tree):
        table[key] = add_folder(table[key], base)
    return tree


def import_tables(tree: dict[str, Any]) -> list[tuple[dict[str, str], str]]:
    """The tables and keys of the tree that may hold an import path."""
    keys = [("task", "kind"), ("verifier", "kind"), ("algorithm", "name"), ("sampler", "kind")]
    tables = [(tree.get(table), key) for table, key in keys]
    verifier = tree.get("verifier")
    rewards = verifier.get("rewards") if isinstance(verifier, dict) else None
    tables += [(reward, "kind") for reward in (rewards if isinstance(rewards, list) else [])]
    for table in (verifier, *(rewards if isinstance(rewards, list) else ())):
        if isinstance(table, dict) and table.get("kind") == "function":
            tables.append((table.get("options"), "path"))
    agents = tree.get("agents")
    tables += [(agent, "sampler") for agent in (agents if isinstance(agents, list) else [])]
    return [(t, k) for t, k in tables if isinstance(t, dict) and isinstance(t.get(k), str)]


def resolve_paths(config: Config, base: Path) -> Config:
    """Make paths absolute that are relative to the config file."""

    def expanded(value: str, field: str) -> Path:
        try:
            return base / Path(value).expanduser()
        except RuntimeError as error:
            user = value.partition("/")[0]
            reason = f"there is no user {user}; write ./{value} for a folder of this name"
            raise UserError(f"{field} = {value!r}: {reason}") from error

    def absolute(value: str | None, field: str) -> str | None:
        if not value or value.startswith("pocket:"):
            return value
        path = expanded(value, field)
        is_path = path.exists() or value.startswith(("/", "./", "../", "~"))
        return str(path.resolve()) if is_path else value  # else: a hub name

    agents = [
        a.model_copy(
            update={k: absolute(getattr(a, k), f"agents.{a.name}.{k}") for k in ("model", "replay")}
        )
        for a in config.agents
    ]
    task = config.task.model_copy(
        update={
            field: absolute(value, f"task.{field}")
            if config.task.kind == "hub"
            else str(expanded(value, f"task.{field}").resolve())
            for field in ("train", "held_out", "exclude")
            if isinstance(value := getattr(config.task, field, None), str)
        }
    )
    return config.model_copy(update={"agents": agents, "task": task})


# ---------------------------------------------------------------- overrides


def apply_overrides(tree: dict[str, Any], overrides: Overrides, folder: Path) -> None:
    """Change the tree in place, from left to right; `folder` is that of the config file.

    An override of algorithm.name drops the tree's settings that the new algorithm does not have, so
    that `algorithm.name=gspo` is enough for a baseline. Settings given by overrides are never dropped.
    """
    before = tree.pop("algorithm", {})
    for override in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(override, tuple):
            key, value = override
            _set(tree, key.split("."), value, f"{key}={value}")
        elif override.startswith("+"):
            merge(tree, read_toml(_arm(override, folder)))
        else:
            set_key(tree, override)
    given = resolve_imports(tree, folder).get("algorithm", {})
    if not isinstance(before, dict):
        tree["algorithm"] = before  # the schema reports it
    elif isinstance(given, dict):
        name = given.get("name")
        if name is not None and name != before.get("name"):
            known = algorithm_class(name).Settings.model_fields
            before = {key: value for key, value in before.items() if key in known}
        tree["algorithm"] = before
        merge(before, given)


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Merge tables key by key; values and lists are replaced."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


def set_key(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key. An agent is named by its position or its name, all agents by `*`."""
    key, equals, text = override.partition("=")
    if key.startswith("-"):
        name = key.strip("-").replace("-", "_")
        raise UserError(f"there is no option {key}. Write a setting as {name}=VALUE; see --help")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key=value, e.g. steps=100")
    if key.count(".") > MAX_DEPTH:
        raise UserError(f"override {override[:60]!r}...: more than {MAX_DEPTH} levels of tables")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        value = text  # a bare word is a string
    _set(tree, key.split("."), value, override)


def _set(node: Any, path: list[str], value: Any, override: str) -> None:
    part, *rest = _one_name(node, path) if isinstance(node, list) else path
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
        node[part] = deepcopy(value)  # a copy per agent: a later override may change one of them


def _arm(override: str, folder: Path) -> Path:
    name = override.removeprefix("+")
    path = folder / ARMS / f"{name}.toml"
    if not name or Path(name).name != name or not path.is_file():
        there = sorted(p.stem for p in (folder / ARMS).glob("*.toml"))
        known = (
            f"there are: {', '.join('+' + n for n in there)}" if there else "there are no others"
        )
        raise UserError(f"override {override!r}: there is no file {path}; {known}")
    return path


def _one_name(items: list[Any], path: list[str]) -> list[str]:
    """The path with its first parts joined if they are the name of an agent with dots: qwen2.5."""
    names = {item.get("name") for item in items if isinstance(item, dict)}
    whole = (n for n in range(len(path), 1, -1) if ".".join(path[:n]) in names)
    end = next(whole, 1)
    return [".".join(path[:end]), *path[end:]]


def _position(items: list[Any], part: str, override: str) -> int:
    names = [item.get("name") for item in items if isinstance(item, dict)]
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    if part in names:
        return names.index(part)
    raise UserError(
        f"override {override!r}: there is no {part!r}; use 0 to {len(items) - 1}, one of {names}, "
        "or * for all"
    )


def with_overrides(source: str, overrides: Overrides) -> str:
    """Where a config comes from, for messages, e.g. "team.toml with override steps=0"."""
    given = overrides.items() if isinstance(overrides, Mapping) else ()
    texts = [mask_override(text) for text in [f"{k}={v}" for k, v in given] or overrides]
    # A table or list may hold a secret under a key of its own: only its name is shown.
    texts = [re.sub(r"=\s*[\[{].*", "=...", text, flags=re.DOTALL) for text in texts]
    texts = [text if len(text) <= 60 else f"{text[:60]}..." for text in texts]
    return f"{source} with override {', '.join(texts)}" if texts else source


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
    if old == new:
        return None
    key = where.rpartition(".")[2]
    return f"{where} is {mask(old, key)!r} there and {mask(new, key)!r} here"


# ---------------------------------------------------------------- errors


def explain(error: ValidationError, table: type[BaseModel], tree: Any) -> str:
    """Return one clause per problem: the place, the problem and the way out."""
    clauses, listed = [], set[tuple[str, ...]]()
    for item in error.errors():
        where = ".".join(str(part) for part in _place(item["loc"], tree))
        message = re.sub(r"^(Value error|Assertion failed), ", "", item["msg"])
        given = item["input"]
        if item["type"] == "model_type":
            message = "must be a table, e.g. { key = value }"
        elif item["type"] in ("list_type", "tuple_type"):
            message = 'Input should be a valid list, e.g. ["a", "b"]'
            if isinstance(given, dict) and not any(key.isdecimal() for key in given):
                message = f"must be a list of tables: write [[{where}]]"
        if item["type"] == "extra_forbidden":
            message, known = _unknown_key(item["loc"], table, tree)
            if known and known not in listed:  # list the keys of a table once
                message += f"; known keys: {', '.join(known)}"
                listed.add(known)
        elif item["type"] == "missing":
            message = "missing; add it"
        elif not isinstance(given, (dict, list, BaseModel)):
            message += f" (given: {mask(given, where)!r})"
        clauses.append(message if message.startswith(where) else f"{where}: {message}")
    return "; ".join(clauses)


def _place(location: Sequence[int | str], tree: Any) -> Iterator[int | str]:
    """The part of an error's location that is in the file: pydantic also names variants of a union."""
    for i, part in enumerate(location):
        if isinstance(tree, dict) and (part in tree or i == len(location) - 1):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part] if part < len(tree) else None  # the place of a value that is missing
        else:
            continue
        yield part


def _unknown_key(
    location: Sequence[int | str], table: type[BaseModel], tree: Any
) -> tuple[str, tuple[str, ...]]:
    """What to write instead of an unknown key; if nothing is similar, the keys that its table knows."""
    *parents, key = (part for part in location if isinstance(part, str))
    if advice := RENAMED.get(".".join([*parents, key])):
        return advice, ()
    if parents == ["algorithm"]:
        name = tree["algorithm"].get("name", "hacpo")
        owners = [n for n, kind in ALGORITHMS.items() if key in kind.Settings.model_fields]
        if owners:
            return f"algorithm.{key} belongs to {', '.join(owners)}, not {name}", ()
        table, parents = algorithm_class(name).Settings, []
    for parent in parents:
        field = table.model_fields.get(parent)  # pydantic also names the variant of a union
        table = next(_tables(field.annotation), table) if field else table
    known = list(table.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]!r}?", ()
    return "unknown key", tuple(known)


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    """The tables in a field's type, e.g. Gym in `str | list[Gym]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _tables(part)
