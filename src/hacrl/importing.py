"""Objects that a config names by an import path, `package.module:object`.

The path may begin with a folder: `/home/me/team/rewards:score` is `score` in /home/me/team/rewards.py.

Training runs such code. Commands that only read (`show`, `samples`, `doctor`, `eval`, `export`,
`compare --report`) refuse it unless they are called with --trust-code: a run directory or config of
someone else must be safe to look at.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from hacrl.errors import UserError, describe

if TYPE_CHECKING:
    from hacrl.config import AgentConfig

_NO_CODE = "HACRL_NO_CODE"  # environment variable, so that worker processes refuse code too


GIVEN = "<python>"
"""Module name in the import path of a function that was given as an object (`hacrl.train(reward=)`)."""
_GIVEN: dict[str, dict[str, Callable[..., Any]]] = {}
"""Import path of a given function -> hash of its source -> the function. Two lambdas have one path."""

_OF_CONFIGS: set[str] = set()  # names of the modules that configs have named with their folder


class CodeRefused(UserError):
    """A config names code, and the command does not run it without --trust-code."""


@contextmanager
def code_allowed(trusted: bool) -> Iterator[None]:
    """Refuse code that a config names inside this block, unless it is trusted."""
    before = os.environ.pop(_NO_CODE, None)
    os.environ.update({} if trusted else {_NO_CODE: "1"})
    try:
        yield
    finally:
        os.environ.pop(_NO_CODE, None)
        os.environ.update({} if before is None else {_NO_CODE: before})


def refuses_code() -> bool:
    return _NO_CODE in os.environ


def check_code(setting: str) -> None:
    """Raise CodeRefused if the command does not run code of a config."""
    if refuses_code():
        raise CodeRefused(
            f"{setting} names code, which this command does not run. If you trust it, add --trust-code"
        )


def remote_code(agent: AgentConfig) -> bool:
    """The agent's `trust_remote_code`; CodeRefused if it is true and the command runs no code."""
    if agent.trust_remote_code:
        check_code(f"agent {agent.name!r}: trust_remote_code = true")
    return agent.trust_remote_code


def add_folder(path: str, base: Path) -> str:
    """Put the absolute folder in front of an import path whose module is in `base`, or in a folder
    relative to it; return other paths (installed packages) unchanged.

    Example: add_folder("rewards:score", Path("/home/me/team")) == "/home/me/team/rewards:score"
    """
    folder, _, rest = path.rpartition("/")
    root = (base / folder).resolve()
    module, colon, _ = rest.partition(":")
    package = module.partition(".")[0]
    found = (root / f"{package}.py").is_file() or (root / package / "__init__.py").is_file()
    return f"{root}/{rest}" if colon and found else path


def source_file(path: str) -> Path | None:
    """The file of the module that an import path names, without importing it; None if unknown."""
    folder, _, rest = path.rpartition("/")
    module = rest.partition(":")[0]
    if folder:
        place = Path(folder, *module.split("."))
        files = [place.with_name(f"{place.name}.py"), place / "__init__.py"]
        return next((file for file in files if file.is_file()), None)
    _search(str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def give_function(function: Callable[..., Any], field: str) -> tuple[str, str]:
    """Keep a function of this process for `given_function`; return its import path and a hash of its
    source. Values that the function takes from outside are not part of the hash."""
    if not hasattr(function, "__code__"):
        kind = type(function).__name__
        raise UserError(f"{field} is a {kind}, not a function; give a def or lambda that calls it")
    source = ""
    with suppress(OSError):  # typed at a prompt, or made by exec
        source = inspect.getsource(function)
    if not source or function.__name__ == "<lambda>":  # two lambdas may share a line
        source += _code_text(function.__code__)
    name = re.sub(r"\W", "", function.__name__)
    path, version = f"{GIVEN}:{name}", sha256(source.encode()).hexdigest()[:12]
    _GIVEN.setdefault(path, {})[version] = function
    pack_functions()  # an error now, not in a worker
    return path, version


def given_function(path: str, version: str) -> Callable[..., Any] | None:
    """The function that `give_function` kept under this path and version; None without one."""
    return _GIVEN.get(path, {}).get(version)


def _code_text(code: CodeType) -> str:
    """What the code does, the same in every process."""
    constants = [_code_text(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    texts = [repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c) for c in constants]
    return f"{code.co_code.hex()} {code.co_names} {texts}"


def pack_functions() -> bytes:
    """The given functions for a worker process; empty without any."""
    import cloudpickle

    try:
        return cloudpickle.dumps(_GIVEN) if _GIVEN else b""
    except Exception as error:  # pickle raises anything
        _GIVEN.clear()
        raise UserError(
            f"the reward function cannot be sent to worker processes ({describe(error)}): keep open "
            "files, locks and models out of its globals, or put it into a file and give its path"
        ) from error


def unpack_functions(data: bytes) -> None:
    """In a worker process: the functions that the trainer packed."""
    if data:
        import cloudpickle

        _GIVEN.update(cloudpickle.loads(data))


def source_files(path: str) -> list[Path]:
    """The files of a user's module, found without importing it: the module that the import path names,
    its package, and modules in its folder that these import. Of an installed package only the module."""
    first = source_file(path)
    folder, _, rest = path.rpartition("/")
    module = rest.partition(":")[0]
    if first is None:
        return []
    root = first.parents[module.count(".") + (first.name == "__init__.py")]
    if not folder and root != Path.cwd():
        return [first]
    found: set[Path] = set()
    names = [module]
    while names:
        name = names.pop().partition(".")[0]
        file = root / f"{name}.py"
        files = {file} if file.is_file() else {*(root / name).rglob("*.py")}
        names += [other for new in files - found for other in _imported(new)]
        found |= files
    return sorted(found)


def _imported(file: Path) -> list[str]:
    """The names of the modules that a file imports, without relative ones."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError, OSError):  # importing it reports the error
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [
        n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level
    ]


def import_object(path: str, field: str) -> Any:
    """Import and return the object at `path`. With a folder in the path, the module is the one in that
    folder, even if another of this name is installed or imported. Otherwise it is looked up as usual,
    and in the current folder.

    `field` is the config key that holds the path; errors name it.
    """
    if path.startswith(f"{GIVEN}:"):
        raise UserError(
            f"{field} = {path!r} is a Python function that was given to hacrl.train. Give it again, "
            "e.g. hacrl.resume(RUN, reward=FUNCTION); commands cannot use it."
        )
    folder, _, rest = path.rpartition("/")
    module_name, _, name = rest.partition(":")
    if not module_name or not name:
        raise UserError(f"{field} = {path!r} is not an import path 'package.module:object'.")
    if not path.startswith("hacrl."):
        check_code(f"{field} = {path!r}")
    _search(folder or str(Path.cwd()))
    try:
        if folder:
            _import_package(module_name.partition(".")[0], folder)
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        way_out = "Install it, or put it into the folder of the config file."
        if module_name.endswith(".py"):
            way_out = f"Write the module without .py: {module_name.removesuffix('.py')}:{name}"
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name!r} ({describe(error)}). {way_out}"
        ) from error
    file = getattr(module, "__file__", None) or ""
    if folder and not Path(file).resolve().is_relative_to(Path(folder).resolve()):
        raise UserError(
            f"{field} = {path!r}: another {module_name!r} was found first ({file}). Rename the module."
        )
    if not hasattr(module, name):
        raise UserError(f"{field} = {path!r}: module {module_name!r} ({file}) has no {name!r}.")
    return getattr(module, name)


def _import_package(name: str, folder: str) -> None:
    """Import the module or package `name` of `folder`, in place of one of this name that an earlier
    config named or that is elsewhere on the path. Modules of Python or of a library that is loaded
    already are not replaced."""
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    replaceable = name in _OF_CONFIGS or (loaded is None and name not in sys.stdlib_module_names)
    if spec and replaceable and getattr(loaded, "origin", None) != spec.origin:
        _OF_CONFIGS.add(name)
        for other in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[other]
        sys.path.insert(0, folder)
        try:
            importlib.import_module(name)
        finally:
            sys.path.remove(folder)


def _search(folder: str) -> None:
    """Let modules in `folder` be imported if no other module has their name."""
    if folder not in sys.path:
        sys.path.append(folder)
