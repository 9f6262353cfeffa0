"""One verifier process: `python -m hacrl.verify.worker FD PARENT_PID`. Started by process.py.

It builds and warms up its verifier, says hello, then answers calls one by one. It must not outlive
the trainer, however that ends: idle, it sees the socket close; busy, Linux kills it with its parent
(PR_SET_PDEATHSIG); elsewhere a thread watches for a new parent, and, should the call hold the
interpreter lock so that no thread runs, the processor-time alarm ends it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from typing import Any

from hacrl.errors import UserError, describe
from hacrl.verify.kinds import build
from hacrl.verify.protocol import Verifier, failed, guarded_judge
from hacrl.verify.wire import HELLO, Frames, frame, pack_verdict, unpack_call

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY = 0.5  # seconds


def main(arguments: list[str]) -> None:
    descriptor, parent, bind = (int(a) for a in arguments)
    die_with(parent, bind=bool(bind))
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    frames = Frames()
    calls = _receive(connection, frames)
    _, payload = next(calls)
    start = pickle.loads(payload)
    sys.path += [path for path in start["paths"] if path not in sys.path]
    _limit_memory(start["memory_gb"])
    verifier = _introduce(connection, start)
    if verifier is not None:
        _silence()
        _serve(connection, calls, verifier, start["timeout"])


def _introduce(connection: socket.socket, start: dict[str, Any]) -> Verifier | None:
    """Builds the verifier and says hello, or says why it cannot be built."""
    try:
        verifier = build(start["kind"], start["options"])
        low, high = verifier.reward_range
        hello = {
            "name": str(verifier.name),
            "version": str(verifier.version),
            "reward_range": [float(low), float(high)],
        }
    except UserError as error:
        connection.sendall(frame(HELLO, json.dumps({"error": str(error)}).encode()))
        return None
    except BaseException as error:  # a user's verifier may raise anything while it is made
        text = f"verifier.kind = {start['kind']!r} cannot start: {describe(error)}"
        connection.sendall(frame(HELLO, json.dumps({"error": text}).encode()))
        return None
    connection.sendall(frame(HELLO, json.dumps(hello).encode()))
    return verifier


def _serve(connection: socket.socket, calls: Any, verifier: Verifier, timeout: float) -> None:
    """Answers calls until the trainer closes the socket."""
    me = os.getpid()
    for number, payload in calls:
        # A last resort far behind the pool's own clock: ends a call that spins for ever with the
        # lock held when nobody is left to kill it. Its default action needs no Python.
        signal.setitimer(signal.ITIMER_PROF, 10 * timeout + 60)
        try:
            reply, problem = unpack_call(payload)
        except Exception as error:  # a column's class that cannot be imported here
            verdict = failed(f"the problem's columns cannot be read: {describe(error)}")
        else:
            verdict = guarded_judge(verifier, reply, problem)
        if os.getpid() != me:
            os._exit(0)  # the verifier forked, and this is the child coming home
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(frame(number, pack_verdict(verdict)))


def _receive(connection: socket.socket, frames: Frames) -> Any:
    while True:
        data = connection.recv(1 << 16)
        if not data:
            return
        yield from frames.feed(data)


def die_with(parent: int, bind: bool) -> None:
    """Ends this process when the trainer ends. `bind` is off when the trainer's main thread did
    not start us: Linux would then kill us with that thread."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if bind and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_EVERY)
        os.killpg(0, signal.SIGKILL)  # with whatever the verifier started

    if os.getppid() != parent:
        os._exit(0)
    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def _limit_memory(gigabytes: float | None) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if gigabytes is None or sys.platform != "linux":
        return
    wanted = int(gigabytes * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _silence() -> None:
    """From here on what a verifier prints goes nowhere (use workers = 0 to see it)."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


if __name__ == "__main__":
    main(sys.argv[1:])
