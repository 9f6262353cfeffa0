"""Writing to disk so that a kill at any moment leaves the old state or the new, never a mixture.

A file or folder is first written under a temporary name beside its place, brought to the disk, and
then renamed: the rename is the one moment at which it comes to be. What a kill leaves under a
temporary name is thrown away by `sweep`. A full disk is the user's to mend, and says so.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hacrl.errors import UserError

_NEW = ".tmp-"  # not there yet, or on its way out: worth nothing
_OLD = ".old-"  # a whole folder put aside while its replacement takes the name
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomic(path: Path, data: bytes | str) -> None:
    """Put `data` at `path`, whole or not at all, replacing what was there."""
    with _new_file(path, data) as new:
        os.replace(new, path)


def write_once(path: Path, data: bytes | str) -> bool:
    """Put `data` at `path` unless a file exists there; return whether it was written.

    Of several processes that try, one succeeds. It needs hard links, not file locks.
    """
    with _new_file(path, data) as new:
        try:
            os.link(new, path)
        except FileExistsError:
            return False
    return True


@contextmanager
def _new_file(path: Path, data: bytes | str) -> Iterator[Path]:
    """Write `data` under a temporary name beside `path`; the block gives it its final name."""
    content = data.encode() if isinstance(data, str) else data
    new = _beside(path, _NEW)
    try:
        with full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(new, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield new
            _sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Add one line at the end, in one write. A torn line left there by a kill is cut off first.

    One writer a file: the torn end of another writer's line would be cut as well.
    """
    if "\n" in line:
        raise ValueError(f"{path}: a line must not contain a line break: {line!r}")
    with full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = _cut_torn_end(handle)
            data = line.encode() + b"\n"
            try:
                written = os.write(handle, data)
                if written < len(data):  # the disk took a part: it has no room for the rest
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                if sync:
                    os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)


def read_whole_lines(path: Path) -> list[str]:
    """The lines of a file, without a torn last one; none when there is no such file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]  # what follows the last line break is torn, or empty
    whole = []
    for number, line in enumerate(lines, start=1):
        try:
            whole.append(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not UTF-8 text ({error.reason})") from error
    return whole


@contextmanager
def whole_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends well it becomes `path`, all at once.

    A folder already there is replaced; with replace=False it raises OSError, so that of several
    processes one succeeds. If the block raises, nothing has changed.

    Example: with whole_folder(run / "step-000010") as new: (new / "state.json").write_text("{}")
    """
    new, old = _beside(path, _NEW), _beside(path, _OLD)
    try:
        with full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            new.mkdir()
            yield new
            for folder, _, names in os.walk(new):
                for name in names:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            # A folder cannot be renamed onto one with content. A kill between the two renames
            # leaves the old one aside, from where sweep() puts it back.
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
    """Remove a folder so that a kill leaves it whole or gone from its name."""
    gone = _beside(folder, _NEW)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Throw away what a kill left half written in `folder` and the folders in it, and put back what
    it left aside.

    For the folder's only writer, before it writes: it would also sweep away another's open work.
    """
    for here, folders, names in os.walk(folder):
        for name in sorted(folders):
            if name.startswith(_OLD):
                place = name.removeprefix(_OLD).rsplit("-", 1)[0]
                if not Path(here, place).exists():
                    os.rename(Path(here, name), Path(here, place))
        for name in folders:
            if name.startswith((_NEW, _OLD)):
                shutil.rmtree(Path(here, name), ignore_errors=True)
        for name in names:
            if name.startswith(_NEW):
                Path(here, name).unlink(missing_ok=True)
        folders[:] = [name for name in folders if not name.startswith((_NEW, _OLD))]


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left" while writing `path` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise full_disk_error(path, error.strerror or str(error)) from error


def full_disk_error(path: Path, reason: str) -> UserError:
    """The one sentence for a disk, quota or file-size limit that is reached."""
    return UserError(
        f"{path}: could not be written: {reason} ({_free_space(path)} free there). "
        "What was there before is unharmed: free space, then `hacrl resume RUN`"
    )


def _free_space(path: Path) -> str:
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    if there is None:
        return "an unknown number of MB"
    return f"{shutil.disk_usage(there).free / 1e6:,.1f} MB"


def _beside(path: Path, prefix: str) -> Path:
    return path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_torn_end(handle: int) -> int:
    """Remove what follows the last line break; return the size that is left."""
    size = os.fstat(handle).st_size
    end, block = size, 1 << 16
    while end > 0:
        start = max(0, end - block)
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
    return end
