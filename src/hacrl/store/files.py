"""Atomic writes: after a kill at any moment, a file or folder holds its old or its new content.

Content is written under a temporary name in the same folder, flushed to disk, and renamed. `sweep`
removes temporary names that a kill left behind.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.safe_text import has_secret

_NEW = ".tmp-"  # unfinished, or being removed
_OLD = ".old-"  # a complete folder, set aside while its replacement takes its name
_STEP = re.compile(r"step-(\d{6,})")


def write_atomic(
    path: Path, data: bytes | str, replace: bool = True, mode: int = 0o666, sync: bool = True
) -> None:
    """Write `data` to `path`. With replace=False an existing file raises FileExistsError: if several
    processes try, one succeeds (by a hard link, without file locks). The umask reduces `mode`.
    sync=False is faster, but a power failure may bring the old content back."""
    new = _beside(path, _NEW)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        (os.replace if replace else os.link)(new, path)
        if sync:
            _sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_config(path: Path, text: str) -> None:
    """Write the text of a config; only the owner can read it if it holds a secret."""
    write_atomic(path, text, mode=0o600 if has_secret(text) else 0o666)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON without the literals NaN and Infinity: numbers that are not finite become null."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


RESTORE = "Restore the file from a backup, or start a new run"
"""The way out where nothing can be computed again."""


@contextmanager
def whole_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes `path` when the block ends. If the block raises,
    nothing changes. A folder that exists at `path` is replaced; with replace=False it raises OSError,
    so that one of several processes succeeds.

    Example: with whole_folder(run / "step-000010") as new: (new / "state.json").write_text("{}")
    """
    new, old = _beside(path, _NEW), _beside(path, _OLD)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        yield new
        mode = new.stat().st_mode & 0o666  # of the umask; safetensors writes 0600
        for here, _, names in os.walk(new):
            for file in (Path(here, name) for name in names):
                file.chmod(mode)
                _sync(file)
            _sync(Path(here))
        # A folder cannot be renamed onto one with content. A kill between the two renames
        # leaves the old one aside; sweep() puts it back.
        if replace and path.exists():
            os.rename(path, old)
        os.rename(new, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_whole(folder: Path) -> None:
    """Remove a folder; after a kill it is complete or gone from its name."""
    gone = _beside(folder, _NEW)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove unfinished files that a kill left anywhere in `folder`, and restore replaced folders. Only
    for the folder's only writer, before it writes: it would remove another's unfinished work."""
    for here, folders, names in os.walk(folder):
        for name in sorted(folders):
            place = Path(here, name.removeprefix(_OLD).rsplit("-", 1)[0])
            if name.startswith(_OLD) and not place.exists():
                os.rename(Path(here, name), place)
            elif name.startswith((_NEW, _OLD)):
                shutil.rmtree(Path(here, name), ignore_errors=True)
        for name in names:
            if name.startswith(_NEW):
                Path(here, name).unlink(missing_ok=True)
        folders[:] = [name for name in folders if not name.startswith((_NEW, _OLD))]


def changed(path: Path, reason: str, way: str = RESTORE) -> UserError:
    """Return the error for a stored file that is not as hacrl wrote it, with the way out."""
    return UserError(f"{path}: {reason}. {way}")


def steps_in(folder: Path, suffix: str = "") -> list[int]:
    """Return the steps that have an entry step-NNNNNN + `suffix` in `folder`, ascending."""
    if not folder.is_dir():
        return []
    names = (_STEP.fullmatch(path.name.removesuffix(suffix)) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _beside(path: Path, prefix: str) -> Path:
    return path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
