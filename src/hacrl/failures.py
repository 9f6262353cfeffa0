"""Errors at the command line: one calm message and an exit code, no traceback.

2    something the user can mend (a config, a file, a full disk)
3    a run that must not go on (stale sampler weights, non-finite updates in a row)
4    out of memory, of a GPU or of the machine
130  stopped by Ctrl-C
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from hacrl.errors import RunStopped, UserError

USER, STOPPED, OUT_OF_MEMORY, INTERRUPTED = 2, 3, 4, 130
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_SIGNS = ("No space left on device", "Disk quota exceeded", "database or disk is full")
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


@contextmanager
def calm(run: Path | None = None) -> Iterator[None]:
    """Run a command; what goes wrong inside becomes a message and an exit code.

    `run` is the directory that the command writes: it is where one can go on afterwards. An error
    that none of these sentences fits is a bug in hacrl and keeps its traceback.
    """
    try:
        yield
    except RunStopped as error:
        _say(f"error: {error}")
        raise typer.Exit(STOPPED) from error
    except KeyboardInterrupt as error:
        _say(_way_on(run))
        raise typer.Exit(INTERRUPTED) from error
    except Exception as error:
        if isinstance(error, typer.Exit) or (message := explain(error)) is None:
            raise
        _say(f"error: {message}")
        raise typer.Exit(OUT_OF_MEMORY if _memory_is_full(error) else USER) from error


def explain(error: BaseException) -> str | None:
    """The sentence for an error that the user can mend; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if _disk_is_full(error):
        return (
            f"no room left on the disk ({_one_line(error)}). What was whole before is unharmed: "
            "free space, then `hacrl resume RUN`"
        )
    if _memory_is_full(error):
        return (
            f"out of memory ({_one_line(error)}). Lower the agents' microbatch_tokens (updates) or "
            "sampler_rows (sampling); neither changes results. `hacrl doctor CONFIG` estimates"
        )
    if isinstance(error, PermissionError):
        return f"{error.filename}: no permission to use it; choose another place"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; choose another place"
    return None


def _disk_is_full(error: BaseException | None) -> bool:
    """Also where a library has wrapped it: TensorBoard's thread, SQLite, safetensors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(sign in str(error) for sign in _FULL_SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _memory_is_full(error: BaseException) -> bool:
    """torch says it by a type of its own, its CPU part and CUDA's libraries by a RuntimeError."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(s in str(error) for s in _MEMORY_SIGNS)


def _way_on(run: Path | None) -> str:
    if run is not None and (run / "config.toml").is_file():
        return f"stopped; go on with `hacrl resume {run}`"
    return "stopped"


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
