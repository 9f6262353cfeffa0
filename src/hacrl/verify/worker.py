"""One verifier process: `python -m hacrl.verify.worker FD PARENT_PID BIND`, started by process.py.

It builds and warms up its verifier, says hello, then answers calls one by one. It never outlives the
trainer. When idle, it sees the socket close. When busy, Linux kills it with its parent
(PR_SET_PDEATHSIG), and a second process then ends everything that the verifier started. Elsewhere a
thread watches the parent; if the call holds the interpreter lock, so that no thread runs, a CPU-time
alarm ends the process.
"""

import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator

from hacrl.errors import EXIT_OUT_OF_MEMORY, UserError, describe, exit_code
from hacrl.importing import unpack_functions
from hacrl.stopping import end_marked_with_me, end_with_parent
from hacrl.verify.protocol import MARK, Verifier, failed, guarded_judge, introduction
from hacrl.verify.settings import make_verifier


def main(arguments: list[str]) -> None:
    """Serve the pool at the other end of the socket until it closes."""
    descriptor, parent, bind = (int(a) for a in arguments)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    end_marked_with_me(os.environ[MARK].encode(), close=descriptor)
    end_with_parent(parent, bind=bool(bind))
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    messages = _messages(connection)
    settings, paths, functions = pickle.loads(next(messages))
    sys.path += [path for path in paths if path not in sys.path]
    _limit_memory(settings.memory_gb)
    try:
        unpack_functions(functions)
        verifier = make_verifier(settings)
        hello = introduction(verifier)
    except UserError as error:
        return _answer(connection, {"error": str(error)})
    except BaseException as error:  # a user's verifier may raise anything
        text = f"verifier.kind = {settings.kind!r} cannot start: {describe(error)}"
        return _answer(connection, {"error": text})
    _answer(connection, hello)
    _discard_output()
    _serve(connection, messages, verifier, settings.timeout)


def _serve(
    connection: socket.socket, messages: Iterator[bytes], verifier: Verifier, timeout: float
) -> None:
    """Answer calls until the trainer closes the socket."""
    me = os.getpid()
    for payload in (payload for message in messages for payload in pickle.loads(message)):
        # A last resort, far behind the pool's own limit: ends a call that spins forever while
        # holding the interpreter lock after the trainer has died. Needs no Python code to run.
        signal.setitimer(signal.ITIMER_PROF, 10 * timeout + 60)
        answer = _judge(verifier, payload)
        if os.getpid() != me:
            os._exit(0)  # the verifier forked, and the child returned here
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(connection, answer)
        if isinstance(answer, dict):
            os._exit(1)  # the pool repeats the call in a new process


def _judge(verifier: Verifier, payload: bytes) -> list[object] | dict[str, str]:
    """The fields of a verdict, or {"error": ...} when this process has no memory left."""
    try:
        reply, problem = pickle.loads(payload)
        verdict = guarded_judge(verifier, reply, problem, raise_memory=True)
    except BaseException as error:
        if exit_code(error) == EXIT_OUT_OF_MEMORY:
            return {"error": describe(error)}
        # the class of a column's value cannot be imported here
        verdict = failed(f"the problem's columns cannot be read: {describe(error)}")
    return [verdict.reward, verdict.status.value, verdict.detail, verdict.parts]


def _messages(connection: socket.socket) -> Iterator[bytes]:
    stream = connection.makefile("rb")
    while header := stream.read(8):
        yield stream.read(int.from_bytes(header, "big"))


def _answer(connection: socket.socket, answer: object) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _limit_memory(gigabytes: float) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not gigabytes or sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(gigabytes * 2**30)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _discard_output() -> None:
    """Send everything the verifier prints to /dev/null (use workers = 0 to see it)."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


if __name__ == "__main__":
    main(sys.argv[1:])
