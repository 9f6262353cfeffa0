"""Write docs/reference.md (every key of a config) from the code.

    python scripts/make_reference.py

tests/test_docs.py fails when the file is stale.
"""

import ast
import inspect
import json
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hacrl.algorithms import ALGORITHMS
from hacrl.algorithms.base import AlgorithmSettings
from hacrl.config import Config
from hacrl.verify.settings import VERIFIERS

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Reference: every key of a config

Look up a key, its values and its default here. This page is generated from the config classes
(`scripts/make_reference.py`). `hacrl schema` prints the same as JSON schema for editors.

Relative paths start at the folder of the config file, also in overrides (`hacrl train CONFIG
task.train=FILE`). In overrides of a stored run (`hacrl resume RUN`, `hacrl eval RUN`) they start at the
current folder.
"""


def type_text(kind: Any) -> str:
    """A type as a reader writes it, e.g. `int or "all"`."""
    if get_origin(kind) is Annotated:
        return type_text(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(type_text(k) for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(json.dumps(value) for value in get_args(kind))
    if get_origin(kind) in (list, tuple):
        inner = [type_text(k) for k in get_args(kind) if k is not Ellipsis]
        return f"list of {inner[0]}"
    if get_origin(kind) is dict or kind is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def bounds(field: FieldInfo) -> str:
    """The limits of a number, e.g. ` >= 1`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f" {sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return ",".join(found)


def default_text(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "below"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value)}`"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def rows(model: type[BaseModel], skip: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """The Markdown table of a config class, without the tables inside it and the keys in `skip`."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = type_text(field.annotation)
        if name in skip or (model is Config and kind in ("table", "list of table")):
            continue
        values = cell(kind + bounds(field))
        lines.append(
            f"| `{name}` | {values} | {default_text(field)} | {cell(field.description or '')} |"
        )
    return [*lines, ""]


def tables_in(kind: Any) -> list[type[BaseModel]]:
    """The config classes that an annotation contains."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [table for inner in get_args(kind) for table in tables_in(inner)]


def section(title: str, model: type[BaseModel], text: str = "") -> list[str]:
    """A table with a heading, and after it the tables inside it."""
    lines = [title, "", *([cell(text), ""] if text else []), *rows(model)]
    name = title.strip("# []")
    for key, field in model.model_fields.items():
        for table in tables_in(field.annotation):
            lines += section(f"### {name}.{key}", table)
    return lines


def verifier_rows(kind: type) -> list[str]:
    """The options of a verifier: a dataclass whose fields have a docstring each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            name = ast.unparse(field.target)
            default = f"`{ast.unparse(field.value)}`" if field.value else "required"
            lines.append(f"| `{name}` | {default} | {cell(ast.literal_eval(doc.value))} |")
    return [*lines, ""] if len(lines) > 2 else ["It has no options.", ""]


def reference() -> str:
    """The text of docs/reference.md."""
    lines = [HEAD, "## Top level", "", *rows(Config)]
    for name, field in Config.model_fields.items():
        if name == "algorithm" or not (found := tables_in(field.annotation)):
            continue
        several = get_origin(field.annotation) is list
        title = f"## [[{name}]]" if several else f"## [{name}]"
        lines += section(title, found[0], field.description or "")
        if name == "verifier":
            for label, verifier in VERIFIERS.items():
                assert isinstance(verifier, type)
                summary = cell((verifier.__doc__ or "").split("Example:")[0])
                lines += [f'### verifier.options of "{label}"', "", summary, ""]
                lines += verifier_rows(verifier)
    lines += ["## [algorithm]", "", "Keys of all algorithms:", "", *rows(AlgorithmSettings)]
    common = set(AlgorithmSettings.model_fields)
    for name, algorithm in ALGORITHMS.items():
        summary = (inspect.getmodule(algorithm).__doc__ or "").split("\n\n")[0]
        lines += [f"### {name}", "", cell(summary), ""]
        own = set(algorithm.Settings.model_fields) - common
        lines += rows(algorithm.Settings, common) if own else ["It has no further keys.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "reference.md").write_text(reference(), encoding="utf-8")
