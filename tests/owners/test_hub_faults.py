"""Kills, restarts, old batches, TLS, and hubs that lie."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hub_clients import MakeHub, pools
from hub_process import NAMES, HubProcess, free_port, rows
from sqlalchemy import Connection, event, select

from hacrl.errors import UserError
from hacrl.owners.batch import Batch, Envelope
from hacrl.owners.client import Contradiction, HubClient, HubRefused
from hacrl.owners.connection import Sender
from hacrl.owners.hub.app import make_app
from hacrl.owners.hub.records import amendments, connect
from hacrl.owners.hub.store import HubStore
from hacrl.owners.signing import Key, Signed, parse

pytestmark = pytest.mark.hub
SIGNERS = (("founder", "founder"), ("bee", "member"))


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
    for receipt in receipts:
        listed = found.content["batches"][receipt.content["agent"]]
        assert {k: receipt.content[k] for k in listed} == listed
        assert bee.snapshot(0) == found
        assert cat.part(0, listed["texts"]).count(b"\n") == 4


def test_requests_from_before_a_restart_are_refused(make_hub: MakeHub) -> None:
    """Nonces are lost with the process, so that a replay would not be noticed otherwise."""
    hub = make_hub()
    sender = Sender(hub.team.id, hub.team.charter.hub, "ant", hub.keys["ant"])
    headers = sender.headers("GET", "/v1/state", b"")
    assert httpx.get(f"{hub.url}/v1/state", headers=headers).status_code == 200
    hub.kill()
    hub.start()
    assert httpx.get(f"{hub.url}/v1/state", headers=headers).json()["error"] == "restarted"


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
    clients[0].snapshot(1)
    hub.kill()
    shutil.rmtree(hub.folder / "data")
    shutil.move(hub.folder / "backup", hub.folder / "data")
    hub.start()
    assert clients[1].snapshot(0) == heads[1]
    known, amend = clients[2], {"kind": "leave", "member": "bee", "step": 5}
    amended = [hub.team.amend(hub.keys[k], signer=s, **amend) for k, s in SIGNERS]
    known.team = known.team.amended(amended[0])
    with pytest.raises(UserError, match="lacks amendments that this member has"):
        known.refresh()
    httpx.post(f"{hub.url}/v1/amendments", content=amended[1].encode()).raise_for_status()
    with pytest.raises(Contradiction, match="two amendments of one number"):
        known.refresh()
    proof = parse((known.folder / "proofs" / "amendments.json").read_bytes())
    assert [r["signature"] for r in proof["records"]] == [a.signature for a in amended]
    # Step 1 was lost with the newer state. Members that have not read it publish the same batch again;
    # one that has read it sees that the hub is older than its own chain.
    assert clients[1].put(hub.batch(clients[1], 1)).content["step"] == 1
    with pytest.raises(HubRefused, match="old backup"):
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
    first = clients[0].snapshot(0)
    with pytest.raises(HubRefused, match="keeps the batches of 2 steps"):
        clients[0].part(0, first.content["batches"]["bee"]["texts"])
    assert clients[0].part(3, headers[0].content["batches"]["bee"]["texts"])


def test_data_files_and_tls(make_hub: MakeHub, tmp_path: Path) -> None:
    data = b'{"question": "1 + 1", "answer": "2"}\n'
    (tmp_path / "team0").mkdir()
    (tmp_path / "team0" / "train.jsonl").write_bytes(data)
    hub = make_hub(start=False, task={"kind": "jsonl", "train": "train.jsonl"})
    pem, private = hub.folder / "cert.pem", hub.folder / "cert.key"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext "
        f"subjectAltName=IP:127.0.0.1 -keyout {private} -out {pem}",
        shell=True,
        check=True,
        capture_output=True,
    )
    hub.start("--certificate", str(pem), "--certificate-key", str(private), wait=False)
    hub.url = hub.url.replace("http:", "https:")
    client = hub.client("ant", verify=str(pem))
    assert client.data("train.jsonl") == data
    with pytest.raises(HubRefused, match="does not serve"):
        client.data("charter.json")
    with pytest.raises(UserError, match="give it with --certificate FILE"):  # at once
        hub.client("bee", patience=3600.0)


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
    folder = hub.folder / name
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
        cat.snapshot(0)
    hub.port = free_port()
    hub.url = f"http://127.0.0.1:{hub.port}"
    with serving(hub, store_of(hub, Forgetful, "one")):
        ant, bee = hub.client("ant"), hub.client("bee")
        for client in (ant, bee):
            client.put(hub.batch(client, 0))
        ant.snapshot(0)
        crossing = hub.client("cat", patience=1.0)
        crossing.put(Batch.build(cat.key, hub.team.id, "cat", 1, rows("cat", 1), "all", cat.head))
        for client in (ant, bee):
            client.put(hub.batch(client, 1))
        ant.snapshot(1)
        with pytest.raises(Contradiction, match="proof"):
            ant.envelopes(1)
    proof = parse((ant.folder / "proofs" / "fork-step-000000.json").read_bytes())
    headers = [Signed("snapshot", r["content"], r["signature"]) for r in proof["records"]]
    assert all(h.valid(hub.team.charter.hub) for h in headers)
    assert [h.content["step"] for h in headers] == [0, 0]
    assert [sorted(h.content["batches"]) for h in headers] == [["ant", "bee"], ["cat"]]


class Censor(HubStore):
    """Leaves out what it has receipted."""

    def _sign_snapshot(self, db: Connection, rows: Mapping[str, Any]) -> Signed:
        return super()._sign_snapshot(db, {name: rows[name] for name in rows if name != "bee"})


def test_a_censored_batch_is_proved_by_its_receipt(make_hub: MakeHub) -> None:
    hub = make_hub(start=False)
    with serving(hub, store_of(hub, Censor, "one")):
        clients = [hub.client(name) for name in NAMES]
        for client in clients:
            client.put(hub.batch(client, 0))
        clients[0].snapshot(0)
        with pytest.raises(Contradiction):
            clients[1].snapshot(0)
    proof = parse((clients[1].folder / "proofs" / "censored-step-000000.json").read_bytes())
    assert [r["kind"] for r in proof["records"]] == ["receipt", "snapshot"]


class Miser(HubStore):
    """Does not give bee's texts to ant."""

    def _may_read(self, member: str, author: str, step: int) -> bool:
        return (member, author) != ("ant", "bee") and super()._may_read(member, author, step)


def test_texts_are_withheld_only_where_the_levels_say_so(make_hub: MakeHub) -> None:
    levels = {"ant": "successes", "bee": "successes", "cat": "all"}
    hub = make_hub(start=False, levels=levels)
    with serving(hub, store_of(hub, Miser, "one")):
        made = pools(hub)
        for name, pool in made.items():
            pool.publish(0, name, rows(name, 0))
        with pytest.raises(HubRefused, match="'ant' publishes less than 'bee'"):
            made["ant"].close(0, [])
        made["bee"].close(0, [])
        shown = [t.agent for t in made["bee"].snapshot(0).rows if t.turns]
        assert sorted(set(shown)) == ["ant", "bee"]  # cat publishes more than bee


def test_a_snapshot_that_does_not_follow_is_refused(make_hub: MakeHub) -> None:
    hub = make_hub()
    clients = [hub.client(name) for name in NAMES]
    for client in clients:
        client.put(hub.batch(client, 0))
    ant: HubClient = clients[0]
    real = ant.snapshot(0)
    fork = hub.keys["hub"].sign("snapshot", {**real.content, "batches": {}})
    ant._store("snapshots", 0, fork)  # what another face of the hub would have shown
    for client in clients[1:]:
        client.put(hub.batch(client, 1))
    envelope = hub.batch(ant, 1, head=real)
    ant.put(envelope)
    with pytest.raises(Contradiction):
        ant.snapshot(1)


class Interrupted(HubStore):
    """Receives an amendment while the batch that it concerns is being unpacked."""

    amendment: Signed | None = None

    def _lateness(self, step: int, member: str, db: Connection | None = None) -> bool:
        if self.amendment is not None:
            found, self.amendment = self.amendment, None
            self.amend(found)
        return super()._lateness(step, member, db)


@pytest.mark.parametrize("kind", ["leave", "rotate"])
def test_an_amendment_during_a_batch_does_not_stop_the_team(make_hub: MakeHub, kind: str) -> None:
    """The batch is judged by the new roster: bee left, or has another key. An amendment is visible after
    its commit only."""
    hub = make_hub(start=False)
    store = store_of(hub, Interrupted, "one")
    ahead: list[int] = []

    def before_commit(_: Connection) -> None:
        ahead.append(len(store.team.chain) - len(store.rows(select(amendments))))

    event.listen(store.engine, "commit", before_commit)
    hub.keys["new"] = Key.new()
    key = {"key": hub.keys["new"].public} if kind == "rotate" else {}
    with serving(hub, store):
        ant, bee, cat = (hub.client(name) for name in NAMES)
        fields = {"kind": kind, "member": "bee", "step": 0, "signer": "member", **key}
        store.amendment = hub.team.amend(hub.keys["bee"], **fields)
        with pytest.raises(HubRefused) as found:
            bee.put(hub.batch(bee, 0))
        assert found.value.code == {"leave": "roster", "rotate": "signature"}[kind]
        assert ahead and max(ahead) == 0 and len(store.team.chain) == 1
        left = [ant, cat] if kind == "leave" else [ant, hub.client("bee", "new"), cat]
        for client in left:
            client.put(hub.batch(client, 0))
        for client in left:
            assert list(client.snapshot(0).content["batches"]) == [c.name for c in left]
            assert len(client.envelopes(0)) == len(left)
