"""One worker process as the pool sees it: start, send a call, receive the answer, kill.

The two sides communicate over a socket. The pool sends pickles, each preceded by its length: the
settings, then lists of calls (columns may hold any value, and the worker trusts the trainer). The worker
sends lines of JSON: a hello, then one verdict per call. A worker may run untrusted code, so nothing that
it sends is unpickled.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hacrl.importing import pack_functions
from hacrl.stopping import start_python
from hacrl.types import Problem, Status, Verdict
from hacrl.verify.protocol import MARK
from hacrl.verify.settings import VerifierConfig


class WorkerProcess:
    """A worker process and the calls sent to it.

    Example: worker.send({7: pack_call("it is 42", problem)}); worker.receive() == {7: verdict}
    """

    def __init__(self, settings: VerifierConfig) -> None:
        self.calls: deque[int] = deque()
        """Numbers of the calls without an answer; it works on the first."""
        self.clock = time.monotonic()
        """When the first call began (the answer to one call is the start of the next); before the
        hello: when the process was started."""
        self.alive = True
        self.hello: dict[str, Any] | None = None
        """Name, version and reward range of the verifier, once the worker is ready."""
        self.error = ""
        """Before the hello: why the verifier cannot be built, as a message to the user. After it:
        why the worker ends (out of memory)."""
        self.used = False  # whether calls were sent to it
        self._timeout = settings.timeout
        self._received = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `kill`)
        self.socket, theirs = socket.socketpair()
        with theirs:
            # One worker is one thread: numeric libraries that start a thread per core would starve
            # the other workers.
            threads = os.environ.get("OMP_NUM_THREADS", "1")
            self._process = start_python(
                "hacrl.verify.worker",
                str(theirs.fileno()),
                variables={"OMP_NUM_THREADS": threads, MARK: uuid.uuid4().hex},
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
            )
        paths = [os.path.abspath(path) for path in sys.path if path]
        with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
            paths.insert(0, os.getcwd())
        self._write(pickle.dumps((settings, paths, pack_functions())))

    @property
    def ready(self) -> bool:
        return self.hello is not None

    def send(self, payloads: Mapping[int, bytes]) -> None:
        """Send calls, by number, to a worker that has none, and start the clock of the first."""
        self.calls, self.clock, self.used = deque(payloads), time.monotonic(), True
        self._write(pickle.dumps(list(payloads.values())))

    def receive(self) -> dict[int, Verdict]:
        """The verdicts that have arrived, by the call's number; never waits. Updates `alive`."""
        try:
            while data := self.socket.recv(1 << 16):
                self._received += data
            self.alive = False
        except BlockingIOError:
            # A child forked by the verifier may keep the socket open after the worker's death.
            self.alive = self._process.poll() is None
        except OSError:
            self.alive = False
        *lines, self._received = self._received.split(b"\n")
        verdicts: dict[int, Verdict] = {}
        try:
            for line in lines:
                self._read_line(line, verdicts)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            self.alive = False  # it does not follow the protocol
        return verdicts

    def kill(self, dying: bool = False) -> str:
        """Kill the worker and return how it ended; its guardian kills what it started. `dying`
        waits up to a second for the exit code of a worker that has closed its socket."""
        try:
            self._process.wait(timeout=1.0 if dying else 0.0)
            killed = False
        except subprocess.TimeoutExpired:
            killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.socket.close()
        with self._output:
            self._output.seek(0)
            printed = self._output.read()[-2000:].decode(errors="replace").strip()
        names = {-known.value: known.name for known in signal.Signals}
        how = f"signal {names.get(code, -code)}" if code < 0 else f"exit code {code}"
        how = "killed" if killed else how
        return f"{how}; it printed: {printed}" if printed and not self.ready else how

    def _write(self, message: bytes) -> None:
        """Send a message to a worker that waits for one. Failure needs no handling here: a dead
        worker is noticed by `receive`, a stuck one by the clock of its call."""
        self.socket.settimeout(self._timeout)
        with contextlib.suppress(OSError):
            self.socket.sendall(len(message).to_bytes(8, "big") + message)
        self.socket.settimeout(0.0)

    def _read_line(self, line: bytes, verdicts: dict[int, Verdict]) -> None:
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            self.error, self.alive = str(answer["error"]), False
        elif self.hello is not None:
            reward, status, detail, given = answer
            parts = tuple((str(name), float(value)) for name, value in given)
            verdicts[self.calls[0]] = Verdict(float(reward), Status(status), str(detail), parts)
            self.calls.popleft()
            self.clock = time.monotonic()
        else:
            self.hello = {key: answer[key] for key in ("name", "version", "reward_range")}


def pack_call(reply: str, problem: Problem) -> bytes:
    """A call as sent to a worker; raises whatever pickle raises for the problem's columns."""
    return pickle.dumps((reply, replace(problem, columns=dict(problem.columns))))
