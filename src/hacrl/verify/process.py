"""A worker process as the pool sees it: start, send, receive, clock, kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import hacrl
from hacrl.types import Verdict
from hacrl.verify import wire
from hacrl.verify.settings import VerifierConfig

_READ = 1 << 16


class WorkerProcess:
    """One process with the calls sent to it. The first of `queued` is the one it is working on,
    since `clock`: a worker answers each call at once, so the answer to one call is the start of
    the next, and several may be sent ahead without blurring anyone's clock.
    """

    def __init__(self, settings: VerifierConfig) -> None:
        self.queued: deque[int] = deque()
        self.hello: dict | None = None
        """Name, version and range of its verifier, once it is warm."""
        self.refusal = ""
        """Why its verifier cannot be made, in words for the user."""
        self.clock = time.monotonic()
        self._out = bytearray()
        self._frames = wire.Frames(most=wire.MOST_BACK)
        # What it prints until it has said hello; closed by `kill`.
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            bind = threading.current_thread() is threading.main_thread()
            self._process = subprocess.Popen(
                [
                    # -P: a random.py in the folder you run from must not shadow the library's
                    *(sys.executable, "-P", "-m", "hacrl.verify.worker"),
                    *(str(theirs.fileno()), str(os.getpid()), str(int(bind))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._noise,
                stderr=self._noise,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own: killed whole, deaf to Ctrl-C
                env=_environment(),
            )
        ours.setblocking(False)
        self.socket = ours
        limits = {"timeout": settings.timeout, "memory_gb": settings.memory_gb}
        start = wire.pack_start(settings.kind, settings.options, _search_paths(), limits)
        self._out += wire.frame(0, start)

    @property
    def ready(self) -> bool:
        return self.hello is not None

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def send(self, number: int, payload: bytes) -> None:
        """Queues a call; `flush` carries it over."""
        if not self.queued:
            self.clock = time.monotonic()
        self.queued.append(number)
        self._out += wire.frame(number, payload)

    def flush(self) -> None:
        """Writes what the socket takes now; never waits (a hung worker reads nothing)."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # it died; `receive` will say so

    def receive(self) -> tuple[list[tuple[int, Verdict]], bool]:
        """All answers that have come in, and whether the worker is still there."""
        answers: list[tuple[int, Verdict]] = []
        alive = True
        try:
            while alive:
                data = self.socket.recv(_READ)
                alive = bool(data)
                for number, payload in self._frames.feed(data):
                    self._take(number, payload, answers)
        except BlockingIOError:
            # A child the verifier forked may keep the socket open after the worker is dead.
            alive = self._process.poll() is None
        except (OSError, ValueError, IndexError):
            alive = False  # gone, or talking nonsense: either way it is of no more use
        return answers, alive

    def _take(self, number: int, payload: bytes, answers: list[tuple[int, Verdict]]) -> None:
        if number == wire.HELLO:
            hello = json.loads(payload)
            if "error" in hello:
                self.refusal = str(hello["error"])
            else:
                self.hello = hello
            return
        verdict = wire.unpack_verdict(payload)
        if number != self.queued[0]:
            raise ValueError("an answer to another call")
        self.queued.popleft()
        self.clock = time.monotonic()
        answers.append((number, verdict))

    def kill(self, dying: bool = False) -> str:
        """Ends the process and all it started; returns how it ended, in words. `dying` when its
        socket has closed: its own end is then near and worth waiting for, because it has a code."""
        try:
            own_end = self._process.wait(timeout=1.0 if dying else 0.0)
        except subprocess.TimeoutExpired:
            own_end = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left in the group
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.socket.close()
        self._noise.seek(0)
        noise = self._noise.read()[-2000:].decode(errors="replace").strip()
        self._noise.close()
        how = "killed" if own_end is None else _ending(code)
        return f"{how}; it printed: {noise}" if noise and not self.ready else how


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _search_paths() -> list[str]:
    """Where a user's verifier may lie: the folder run from and wherever this process looks."""
    return [str(Path.cwd()), *(str(Path(path).absolute()) for path in sys.path if path)]


def _environment() -> dict[str, str]:
    """The worker must find this very package, also when it was never installed; and one worker
    is one thread: numeric libraries starting a thread for each core would starve the others."""
    environment = dict(os.environ)
    root = str(Path(hacrl.__path__[0]).parent)
    if root != sysconfig.get_path("purelib"):
        parts = [environment.get("PYTHONPATH", ""), root]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
