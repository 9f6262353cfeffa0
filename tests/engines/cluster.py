"""A Ray cluster of several nodes on one machine, with its own token, ports and folder."""

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

QUICK = {  # a dead node is noticed after about 3 seconds instead of 14; a slow one is not dead
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 20000,
    "health_check_failure_threshold": 4,
}


def free_port() -> int:
    """A port outside the ranges that the system and Ray choose from, so that it is still free when Ray
    uses it."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class Node:
    """A process `ray start --block` and its children, in one session."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill all processes at once, like a power failure."""
        for _ in range(3):  # a process may have started another one meanwhile
            for pid in self._session():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait()

    def _session(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) == self.process.pid:
                        found.append(int(entry.name))
                except (ProcessLookupError, PermissionError):
                    continue
        return found


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        self.environment = {
            **os.environ,
            "PYTHONPATH": ":".join(paths),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.nodes: list[Node] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def head(self, **resources: float) -> Node:
        return self._start(
            "--head",
            f"--port={self.port}",
            f"--ray-client-server-port={free_port()}",
            f"--temp-dir={self.folder}",
            "--include-dashboard=false",
            f"--system-config={json.dumps(QUICK)}",
            resources=resources,
        )

    def node(self, **resources: float) -> Node:
        return self._start(f"--address={self.address}", resources=resources)

    def _start(self, *arguments: str, resources: dict[str, float]) -> Node:
        options = [
            "--num-cpus=2",
            "--num-gpus=0",
            "--object-store-memory=100000000",
            # Any free port: nodes of one machine would otherwise use the same ones.
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            "--disable-usage-stats",
            f"--resources={json.dumps(resources)}",
        ]
        node = Node([*arguments, *options], self.environment, self.folder / "nodes.log")
        self.nodes.append(node)
        return node

    def wait_for_port(self) -> None:
        for _ in range(3000):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError((self.folder / "nodes.log").read_text())


@contextmanager
def cluster() -> Iterator[Cluster]:
    # A short path: names of Ray's sockets may have about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="hacrl-ray-", dir="/tmp"))
    made = Cluster(folder)
    try:
        yield made
    finally:
        for node in reversed(made.nodes):
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)
