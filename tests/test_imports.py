"""Import directions between the packages of hacrl, read from the source (see docs/architecture.md).

    cli, hacrl/__init__  ->  runs, study  ->  cluster  ->  training  ->  the other packages
    cli, study  ->  view  ->  store, tasks

An import under `if TYPE_CHECKING` is not counted; one inside a function is.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "hacrl"
LIBRARIES = {"text", "tasks", "verify", "algorithms", "store", "policy", "sampling", "logs"}
TOP = {"training", "cluster", "runs", "study", "cli", "owners", "view"}
FORBIDDEN = {
    **dict.fromkeys(LIBRARIES, TOP | {"trust"}),
    "trust": TOP,
    **{name: TOP | {"trust", "policy"} for name in ("text", "tasks", "verify")},
    "training": TOP - {"training"},
    "cluster": {"study", "cli", "runs", "owners", "view"},
    "runs.py": {"study", "cli", "owners", "view"},
    "study": {"cli", "owners"},
    "owners": {*LIBRARIES - {"store"}, *TOP - {"owners"}},
    "view": {*LIBRARIES - {"store", "tasks"}, *TOP - {"view"}},
}
"""Package or module -> what it must not import. Other modules of the top level import none of TOP."""
PUBLIC = {"__init__.py", "__main__.py", "api.py"}


def imports(node: ast.AST) -> Iterator[str]:
    """Names of the modules of hacrl that are imported below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from imports(child)


def violations() -> set[tuple[str, str]]:
    found = set()
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC)
        if str(file) in PUBLIC or file.parts[0] == "cli":
            continue
        forbidden = FORBIDDEN.get(file.parts[0], TOP)
        for module in imports(ast.parse(path.read_text())):
            root, _, rest = module.partition(".")
            if root == "hacrl" and rest.partition(".")[0] in forbidden:
                found.add((str(file), rest.partition(".")[0]))
    return found


def test_import_directions() -> None:
    assert violations() == set()


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_packages_exist(name: str) -> None:
    """A renamed package must be renamed here too."""
    assert (SRC / name).exists()


def test_package_data_is_complete() -> None:
    """Every file below src/hacrl that is not Python is part of the wheel."""
    project = tomllib.loads((SRC.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["hacrl"]
    packed = {path for pattern in patterns for path in SRC.glob(pattern)}
    files = {p for p in SRC.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert files - packed == set()


@pytest.mark.parametrize(
    "modules",
    [
        "hacrl.config, hacrl.algorithms",
        "hacrl.owners.hub.server, hacrl.owners.client",
        "hacrl.view.server, hacrl.cli.results",
    ],
)
def test_readers_need_no_torch(modules: str) -> None:
    """A hub runs on a small machine; a config with a typo and a page answer quickly."""
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
