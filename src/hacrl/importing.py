"""Objects that a config names by an import path, `package.module:object`.

The path may begin with a folder: `/home/me/team/rewards:score` is `score` in /home/me/team/rewards.py.

Training runs such code. Commands that only read (`show`, `samples`, `doctor`, `eval`, `export`,
`compare --report`) refuse it unless they are called with --trust-code: a run directory or config of
someone else must be safe to look at.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.errors import UserError, describe

if TYPE_CHECKING:
    from hacrl.config import AgentConfig

_NO_CODE = "HACRL_NO_CODE"
"""Environment variable, so that worker processes refuse code too."""


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


def import_object(path: str, field: str) -> Any:
    """Import and return the object at `path`. Without a folder in the path, modules in the current
    folder can be imported.

    `field` is the config key that holds the path; errors name it.
    """
    folder, _, rest = path.rpartition("/")
    module_name, _, name = rest.partition(":")
    if not module_name or not name:
        raise UserError(f"{field} = {path!r} is not an import path 'package.module:object'.")
    if not path.startswith("hacrl."):
        check_code(f"{field} = {path!r}")
    if (place := folder or str(Path.cwd())) not in sys.path:
        sys.path.append(place)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name!r} ({describe(error)}). Install it, or "
            "put it into the folder of the config file."
        ) from error
    file = getattr(module, "__file__", None) or ""
    if folder and not Path(file).resolve().is_relative_to(Path(folder).resolve()):
        raise UserError(
            f"{field} = {path!r}: another {module_name!r} was found first ({file}). Rename the module."
        )
    if not hasattr(module, name):
        raise UserError(f"{field} = {path!r}: module {module_name!r} ({file}) has no {name!r}.")
    return getattr(module, name)
