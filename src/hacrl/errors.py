"""Errors that the user can fix, exit codes, and the one place that turns an error into text.

This module imports neither torch nor typer, so that workers, actors and `hacrl show` can use it.
"""

import errno

EXIT_USER = 2  # the user can fix it: a config, a file, a full disk
EXIT_STOPPED = 3  # the run must not continue: stale sampler weights, repeated non-finite updates
EXIT_OUT_OF_MEMORY = 4  # out of memory, on the GPU or on the machine
EXIT_INTERRUPTED = 130  # stopped by Ctrl-C
EXIT_TERMINATED = 143  # stopped by SIGTERM

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "database or disk is full")
_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class UserError(ValueError):
    """An error the user can fix. The message names the field, the value and the way out.

    The command line prints it without a traceback and exits with EXIT_USER.
    """


class Terminated(SystemExit):
    """SIGTERM, raised at a safe point (stopping.py). Ctrl-C raises KeyboardInterrupt there."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)


class RunStopped(RuntimeError):
    """A run that must not continue (stale sampler weights, repeated non-finite updates)."""


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its type if the message is empty.

    An error that Ray raised for an actor has the actor's error in `cause`; that one is described.
    """
    try:
        if isinstance(cause := getattr(error, "cause", None), Exception):
            return describe(cause)
        text = str(error).strip()
    except Exception:  # the message of a user's exception can itself fail
        text = ""
    return (text or type(error).__name__).splitlines()[0][:300]


def describe(error: BaseException) -> str:
    """Type and first line, e.g. "KeyError: 'answer'"."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def explain(error: BaseException) -> str | None:
    """The message for an error that the user can fix; None for a bug in hacrl."""
    if isinstance(error, (UserError, RunStopped)):
        return str(error)
    if _disk_is_full(error):
        return (
            f"the disk is full ({first_line(error)}). Files written before are intact: free space, "
            "then `hacrl resume RUN`"
        )
    if _memory_is_full(error):
        return (
            f"out of memory ({first_line(error)}). Lower microbatch_tokens (updates) or sampler_rows "
            "(sampling) of the agents; neither changes results. `hacrl doctor CONFIG` estimates the "
            "memory needed"
        )
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("hacrl"):
        name = error.name.partition(".")[0]
        return f"the package {name} is not installed. Install hacrl with its dependencies (README)"
    if isinstance(error, PermissionError):
        return (
            f"{error.filename}: permission denied; change its permissions, or choose another path"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; choose another path"
    return None


def interruption(error: BaseException | None) -> KeyboardInterrupt | Terminated | None:
    """The Ctrl-C or SIGTERM that an error comes from: interrupted imports can raise other errors."""
    while error is not None and not isinstance(error, (KeyboardInterrupt, Terminated)):
        error = error.__cause__ or error.__context__
    return error


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, Terminated):
        return EXIT_TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, RunStopped):
        return EXIT_STOPPED
    return EXIT_OUT_OF_MEMORY if _memory_is_full(error) else EXIT_USER


def _disk_is_full(error: BaseException | None) -> bool:
    """Also finds the error inside one of a library (TensorBoard's thread, safetensors)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        if any(text in str(error) for text in _DISK_FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _memory_is_full(error: BaseException) -> bool:
    """torch has its own type on the GPU; its CPU allocator and cuBLAS raise RuntimeError."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)
