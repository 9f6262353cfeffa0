"""Agents in parallel on one machine: one process for each, without Ray.

One agent samples while another learns. They wait for one another only at the barrier of a step. The
loop is that of loop.py; a call to an agent is a message to its process. If the process ends, the call
raises AgentLost, and the next call starts it again. `kill -9` of the run ends all processes.

    python -P -m hacrl.cluster.processes NAME FD PARENT_PID BIND    (started by ProcessExecutor)
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

from hacrl.cluster.actor import AgentActor, AgentSpec, Failed
from hacrl.logs.observer import PHASES
from hacrl.stopping import check, end_with_parent, start_python
from hacrl.store.pool import Pool
from hacrl.tasks import Task
from hacrl.training.loop import AgentLost, Executor

POLL = 0.5  # seconds between two checks for Ctrl-C and SIGTERM
GRACE = 10.0  # seconds that an idle process has to end by itself


class AgentProcess:
    """The process of one agent and the connection to it."""

    def __init__(self, spec: AgentSpec) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self.process = start_python(  # the name tells the processes apart in `ps`
                "hacrl.cluster.processes", spec.agent, str(number), pass_fds=[number]
            )
        self.connection = Connection(ours.detach())
        self.busy = False
        paths = [os.path.abspath(path) for path in sys.path if path]
        self.send((paths, spec))

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next `receive` reports it
            self.connection.send(message)

    async def receive(self) -> Any:
        """Wait for the answer of a call; AgentLost if the process has ended."""
        arrived, loop = asyncio.Event(), asyncio.get_running_loop()
        number = self.connection.fileno()
        loop.add_reader(number, arrived.set)
        try:
            while not arrived.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), POLL)
                check()
            return self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise AgentLost(self.end()) from error
        finally:
            loop.remove_reader(number)

    def end(self) -> str:
        """End the process, at once if it is busy, and return how it ended."""
        if not self.connection.closed:
            self.connection.close()  # an idle process ends by itself
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.1 if self.busy else GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class ProcessExecutor(Executor):
    """Runs calls in one process per agent."""

    def open(self, stack: ExitStack, task: Task, pool: Pool) -> None:
        self.processes = {a.name: self._start(a.name) for a in self.config.agents}
        stack.callback(self._end)

    async def call(self, name: str, method: str, *args: Any) -> Any:
        check()
        self.observer.phase(PHASES.get(method, method))
        process = self.processes.get(name) or self._start(name)
        self.processes[name] = process
        process.busy = True
        process.send((method, args))
        try:
            answer = await process.receive()
        except AgentLost:
            del self.processes[name]
            raise
        process.busy = False
        if isinstance(answer, Failed):
            raise answer.error()
        if isinstance(answer, Exception):
            raise answer
        self.report(name, answer.seconds, answer.notes)
        return answer.value

    def _start(self, name: str) -> AgentProcess:
        run = str(self.run.path.absolute())
        return AgentProcess(AgentSpec(self.config, name, run, self.hooks))

    def _end(self) -> None:
        for process in self.processes.values():
            process.connection.close()  # all idle ones end at the same time
        for process in sorted(self.processes.values(), key=lambda p: not p.busy):
            process.end()


def main() -> None:
    """Serve the calls of the run, until it closes the connection or ends."""
    descriptor, parent, bind = (int(argument) for argument in sys.argv[2:])
    end_with_parent(parent, bool(bind))
    connection = Connection(descriptor)
    paths, spec = connection.recv()
    sys.path.extend(path for path in paths if path not in sys.path)
    actor = AgentActor(spec)
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            method, args = connection.recv()
            try:
                answer: Any = actor.call(method, args)
            except Exception as error:
                answer = _portable(error)
            connection.send(answer)
    actor.close()


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note; another one if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(traceback.format_exc())
    return error


if __name__ == "__main__":
    main()
