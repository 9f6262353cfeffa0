"""Objects that a config names by an import path, `package.module:object`.

The path may begin with a folder: `/home/me/team/rewards:score` is `score` in /home/me/team/rewards.py.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hacrl.errors import UserError


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
    if (folder := folder or str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name!r} ({error}). Install it, or put it into "
            "the folder of the config file."
        ) from error
    if not hasattr(module, name):
        raise UserError(
            f"{field} = {path!r}: module {module_name!r} ({module.__file__}) has no {name!r}."
        )
    return getattr(module, name)
