"""Ctrl-C and SIGTERM stop a run at a safe point.

An exception that a signal handler raises can land in a finaliser, where Python discards it. Inside
`stoppable` the handler therefore only sets a flag, and `check` raises KeyboardInterrupt or
`Terminated` from ordinary code: between decode rounds, micro-batches, verifier calls and phases. The
same signal a second time has its default effect and ends the process at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hacrl.errors import Terminated

WATCH_EVERY = 0.5  # seconds between two looks at the parent process
_PR_SET_PDEATHSIG = 1
_received = 0  # the signal to stop for; 0 if there was none
_previous: dict[int, Any] = {}  # handlers that `stoppable` has replaced


def check() -> None:
    """Raise KeyboardInterrupt or `Terminated` if the run is to stop. Cheap: it reads one variable."""
    _raise_for(_received)


def _raise_for(number: int) -> None:
    if number:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[None]:
    """In this block Ctrl-C and SIGTERM take effect at the next `check`, at the latest at its end. A
    signal that is ignored (nohup) stays ignored. The block has no effect outside of the main thread,
    which alone has signal handlers, or inside another such block."""
    global _received
    check()
    if _previous or threading.current_thread() is not threading.main_thread():
        yield
        return
    number: int
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                _previous[number] = handler
                signal.signal(number, _receive)
        yield
    finally:
        handlers = [*reversed(_previous.items())]  # that of Ctrl-C, which raises, is the last one
        _previous.clear()
        for number, handler in handlers:
            signal.signal(number, handler)
        last, _received = _received, 0
    _raise_for(last)  # after the handlers are restored, so that no signal is lost


def remember_ctrl_c() -> None:
    """Let Ctrl-C raise as usual, and also stop the next `stoppable` block: code that is loading can
    discard the exception. During an import it ends the process at once, because torch aborts if an
    exception passes through its C++ code. For the whole process of a command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    global _received
    _received = number
    while frame:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _receive(number: int, frame: object) -> None:
    global _received
    _received = _received or number
    # A second Ctrl-C must not end a notebook or an interactive session.
    signal.signal(
        number, _previous.get(number, signal.SIG_DFL) if hasattr(sys, "ps1") else signal.SIG_DFL
    )


def start_python(
    module: str, *arguments: str, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS PARENT BIND`, whose last arguments are for `end_with_parent`,
    in a process group of its own, which Ctrl-C does not reach. It imports this very package, also if
    that is not installed. `variables` are added to its environment, `options` are those of Popen."""
    bind = threading.current_thread() is threading.main_thread()
    environment = {**os.environ, **(variables or {})}
    root = str(Path(__file__).parents[1])
    if root != sysconfig.get_path("purelib"):
        paths = [environment.get("PYTHONPATH", ""), root]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.Popen(
        # -P: a random.py in the working directory must not shadow the standard library.
        [sys.executable, "-P", "-m", module, *arguments, str(os.getpid()), str(int(bind))],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        **options,
    )


def end_with_parent(parent: int, bind: bool) -> None:
    """End this process and its process group when the process `parent`, which started it, ends. On
    Linux the kernel does it at once, with `bind`; it is off if a side thread of the parent started this
    process, because the kernel would kill it when that thread ends."""
    if bind:
        _signal_on_death_of_parent(signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY)
        os.killpg(0, signal.SIGKILL)

    if os.getppid() != parent:
        os._exit(0)
    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def end_marked_with_me(mark: bytes, close: int) -> None:
    """Kill every process with `mark` in its environment when this process ends, even by SIGKILL, and
    even if they started a session of their own: a second process waits for the end. `close` is a
    descriptor that it must not keep open. Linux only. Call it before any thread is started."""
    if sys.platform != "linux":
        return
    me = os.getpid()
    if os.fork():
        return
    try:
        os.setsid()
        os.close(close)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        _signal_on_death_of_parent(signal.SIGTERM)
        while os.getppid() == me:  # another process may send the signal, too
            signal.sigwait([signal.SIGTERM])
        kill_marked(mark)
    finally:
        os._exit(0)


def kill_marked(mark: bytes) -> None:
    """Kill every other process with `mark` in its environment. Linux only; a process that was given
    another environment stays."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _signal_on_death_of_parent(number: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
