"""Kills, restarts, old batches, TLS, and hubs that lie."""

import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hub_process import NAMES, HubProcess, free_port, rows
from sqlalchemy import Connection

from hacrl.errors import UserError
from hacrl.owners.batch import Batch, Envelope
from hacrl.owners.client import Contradiction, HubClient, HubRefused
from hacrl.owners.connection import Connection as Http
from hacrl.owners.connection import Sender
from hacrl.owners.hub.app import make_app
from hacrl.owners.hub.store import HubStore
from hacrl.owners.hub.tables import connect
from hacrl.owners.signing import Signed, parse

pytestmark = pytest.mark.hub
MakeHub = Callable[..., HubProcess]


def test_a_kill_between_put_and_close_loses_nothing(any_hub: MakeHub) -> None:
    hub = any_hub()
    ant, bee, cat = (hub.client(name) for name in NAMES)
    receipts = [client.put(hub.batch(client, 0)) for client in (ant, bee)]
    hub.kill()
    hub.start()
    assert ant.put(hub.batch(ant, 0)) == receipts[0]  # the same signed receipt
    receipts.append(cat.put(hub.batch(cat, 0)))
    hub.kill()
    hub.start()
    found = ant.snapshot(0)
    assert found is not None
    for receipt in receipts:
        listed = found.content["batches"][receipt.content["agent"]]
        assert {k: receipt.content[k] for k in listed} == listed
        assert bee.snapshot(0) == found
        assert cat.part(0, listed["texts"]).count(b"\n") == 4


def test_random_kills_of_the_hub(any_hub: MakeHub) -> None:
    """Members go on; all have one chain, and it holds every batch that was acknowledged."""
    hub = any_hub(steps=6)
    draw = random.Random(7)

    def member(name: str) -> list[Signed]:
        client, chain = hub.client(name, patience=60.0), []
        for step in range(6):
            client.put(hub.batch(client, step))
            found = client.snapshot(step)
            assert found is not None
            chain.append(found)
            time.sleep(0.5)
        return chain

    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(member, name) for name in NAMES]
        for _ in range(6):
            time.sleep(draw.uniform(0.05, 1.5))
            hub.kill()
            hub.start()
        chains = [r.result() for r in results]
    assert chains[0] == chains[1] == chains[2]
    assert all(set(header.content["batches"]) == set(NAMES) for header in chains[0])


def test_requests_from_before_a_restart_are_refused(make_hub: MakeHub) -> None:
    """Nonces are lost with the process, so that a replay would not be noticed otherwise."""
    hub = make_hub()
    sender = Sender(hub.team.id, hub.team.charter.hub, "ant", hub.keys["ant"])
    headers = sender.headers("GET", "/v1/state", b"")
    http = Http(hub.url)
    assert http._once("GET", "/v1/state", b"", headers)[0] == 200
    hub.kill()
    hub.start()
    status, answer = http._once("GET", "/v1/state", b"", headers)
    assert (status, json.loads(answer)["error"]) == (401, "restarted")


def test_backup_and_restore(make_hub: MakeHub) -> None:
    """A copy of the folder of a stopped hub, with its SQLite database, continues the team."""
    hub = make_hub()
    clients = [hub.client(name) for name in NAMES]
    for client in clients:
        client.put(hub.batch(client, 0))
    heads = [client.snapshot(0) for client in clients]
    hub.kill()
    shutil.copytree(hub.folder / "data", hub.folder / "backup")
    hub.start()
    for client in clients:
        client.put(hub.batch(client, 1))
    assert clients[0].snapshot(1) is not None
    hub.kill()
    shutil.rmtree(hub.folder / "data")
    shutil.move(hub.folder / "backup", hub.folder / "data")
    hub.start()
    assert clients[1].snapshot(0) == heads[1]
    # Step 1 was lost with the newer state. Members that have not read it publish the same batch again;
    # one that has read it sees that the hub is older than its own chain.
    assert clients[1].put(hub.batch(clients[1], 1)).content["step"] == 1
    with pytest.raises(HubRefused, match="restored from an old backup"):
        clients[0].put(hub.batch(clients[0], 1))


def test_old_batches_are_removed(make_hub: MakeHub) -> None:
    hub = make_hub(start=False)
    hub.start("--keep-steps", "2")
    clients = [hub.client(name) for name in NAMES]
    for step in range(4):
        for client in clients:
            client.put(hub.batch(client, step))
        headers = [client.snapshot(step) for client in clients]
    assert len(list((hub.folder / "data" / "parts").rglob("*.gz"))) == 2 * 3 * 2
    first = clients[0].known(0)
    assert first is not None and headers[0] is not None
    with pytest.raises(HubRefused, match="keeps the batches of 2 steps"):
        clients[0].part(0, first.content["batches"]["bee"]["texts"])
    assert clients[0].part(3, headers[0].content["batches"]["bee"]["texts"])


def test_data_files_and_tls(make_hub: MakeHub) -> None:
    hub = make_hub(start=False, task={"kind": "arithmetic"})
    data = b'{"question": "1 + 1", "answer": "2"}\n'
    pem, private = hub.folder / "cert.pem", hub.folder / "cert.key"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext "
        f"subjectAltName=IP:127.0.0.1 -keyout {private} -out {pem}",
        shell=True,
        check=True,
        capture_output=True,
    )
    (hub.folder / "train.jsonl").write_bytes(data)
    other = HubProcess.__new__(HubProcess)
    folder = hub.folder / "served"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(data)
    other.__init__(folder, task={"kind": "jsonl", "train": "train.jsonl"})  # type: ignore[misc]
    try:
        options = ("--certificate", str(pem), "--certificate-key", str(private))
        other.start(*options, wait=False)
        other.url = other.url.replace("http:", "https:")
        client = other.client("ant", verify=str(pem))
        assert client.data("train.jsonl") == data
        with pytest.raises(HubRefused, match="does not serve"):
            client.data("charter.json")
        with pytest.raises(UserError, match="give it with --certificate FILE"):  # at once
            other.client("bee", patience=3600.0)
    finally:
        other.kill()


# ---------------------------------------------------------------- hubs that lie


@contextmanager
def serving(hub: HubProcess, store: HubStore) -> Iterator[None]:
    """Serve a store from this process at the address of the hub."""
    config = uvicorn.Config(make_app(store, {}), port=hub.port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield
    server.should_exit = True
    thread.join()


def store_of(hub: HubProcess, kind: type[HubStore], name: str) -> HubStore:
    folder: Path = hub.folder / name
    folder.mkdir()
    return kind(hub.team, hub.keys["hub"], connect(f"sqlite:///{folder}/hub.db"), folder)


class Forgetful(HubStore):
    """Accepts envelopes that name the snapshots of its other face."""

    def _check_head(self, envelope: Envelope) -> None:
        pass


def test_an_equivocating_hub_is_proved_by_the_first_batch_that_crosses(make_hub: MakeHub) -> None:
    """The hub shows ant and bee one step 0, and cat another."""
    hub = make_hub(start=False, deadline=0.3, staleness=1)
    with serving(hub, store_of(hub, HubStore, "other")):
        cat = hub.client("cat")
        cat.put(hub.batch(cat, 0))
        assert cat.snapshot(0) is not None
    hub.port = free_port()
    hub.url = f"http://127.0.0.1:{hub.port}"
    with serving(hub, store_of(hub, Forgetful, "one")):
        ant, bee = hub.client("ant"), hub.client("bee")
        for client in (ant, bee):
            client.put(hub.batch(client, 0))
        assert ant.snapshot(0) is not None
        crossing = hub.client("cat", patience=1.0)
        crossing.put(Batch.build(cat.key, hub.team.id, "cat", 1, rows("cat", 1), "all", cat.head))
        for client in (ant, bee):
            client.put(hub.batch(client, 1))
        assert ant.snapshot(1) is not None
        with pytest.raises(Contradiction, match="proof"):
            ant.envelopes(1)
    proof = parse((ant.folder / "proofs" / "fork-step-000000.json").read_bytes())
    headers = [Signed("snapshot", r["content"], r["signature"]) for r in proof["records"]]
    assert all(h.valid(hub.team.charter.hub) for h in headers)
    assert [h.content["step"] for h in headers] == [0, 0]
    assert [sorted(h.content["batches"]) for h in headers] == [["ant", "bee"], ["cat"]]


class Censor(HubStore):
    """Leaves out what it has receipted."""

    def _sign_snapshot(self, db: Connection) -> Signed:
        real = self.key

        class Without:
            def sign(self, kind: str, content: dict[str, Any]) -> Signed:
                content["batches"].pop("bee", None)
                return real.sign(kind, content)

        self.key = Without()  # type: ignore[assignment]
        try:
            return super()._sign_snapshot(db)
        finally:
            self.key = real


def test_a_censored_batch_is_proved_by_its_receipt(make_hub: MakeHub) -> None:
    hub = make_hub(start=False)
    with serving(hub, store_of(hub, Censor, "one")):
        clients = [hub.client(name) for name in NAMES]
        for client in clients:
            client.put(hub.batch(client, 0))
        assert clients[0].snapshot(0) is not None
        with pytest.raises(Contradiction):
            clients[1].snapshot(0)
    proof = parse((clients[1].folder / "proofs" / "censored-step-000000.json").read_bytes())
    assert [r["kind"] for r in proof["records"]] == ["receipt", "snapshot"]


def test_a_snapshot_that_does_not_follow_is_refused(make_hub: MakeHub) -> None:
    hub = make_hub()
    clients = [hub.client(name) for name in NAMES]
    for client in clients:
        client.put(hub.batch(client, 0))
    ant: HubClient = clients[0]
    real = ant.snapshot(0)
    assert real is not None
    fork = hub.keys["hub"].sign("snapshot", {**real.content, "batches": {}})
    ant._store("snapshots", 0, fork)  # what another face of the hub would have shown
    for client in clients[1:]:
        client.put(hub.batch(client, 1))
    envelope = hub.batch(ant, 1, head=real)
    ant.put(envelope)
    with pytest.raises(Contradiction):
        ant.snapshot(1)
