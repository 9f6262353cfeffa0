"""Objects that a config names by an import path, `package.module:object`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hacrl.errors import UserError


def import_object(path: str, field: str) -> Any:
    """Import and return the object at `path`. Modules in the current folder can be imported.

    `field` is the config key that holds the path; errors name it.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"{field} = {path!r} is not an import path 'package.module:object'.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name!r} ({error}). Install it, or run hacrl "
            "in the folder that contains it."
        ) from error
    if not hasattr(module, name):
        raise UserError(f"{field} = {path!r}: module {module_name!r} has no {name!r}.")
    return getattr(module, name)
