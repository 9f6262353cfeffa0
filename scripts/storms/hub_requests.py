"""Forged, mutated, replayed and oversized requests to a hub: none may be accepted.

    python scripts/storms/hub_requests.py --count 1000 --seed 0 [--database postgres]

A stranger has no key of the team. A hostile member ("ant") has one, and signs its requests correctly.
Both send requests to a real hub process. Afterwards the honest members close the step. Findings are a
request that was accepted, an answer with status 500, a request of more than 30 seconds, a snapshot or
a list of batches with anything but the honest ones, which is all that members train on, a changed chain
of amendments, or a hub above 300 MB.
"""

import argparse
import gzip
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from hub_process import NAMES, HubProcess, postgres_server, rows

from hacrl.owners.batch import Batch
from hacrl.owners.connection import Sender
from hacrl.owners.signing import Key, Signed, canonical, sha256

SECONDS = 30.0
MEMORY = 300e6
BOMB = gzip.compress(b"x" * 80_000_000)
ODD_PATHS = [
    "/v1/steps/-1/snapshot",
    "/v1/steps/9999999999999999999999/batch",
    "/v1/data/%2e%2e/hub.key",
]
Request = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers, body."""


class Attack:
    """Makes requests that a correct hub refuses."""

    def __init__(self, hub: HubProcess, draw: random.Random) -> None:
        self.hub, self.draw, self.team = hub, draw, hub.team
        self.sender = Sender(self.team.id, self.team.charter.hub, "ant", hub.keys["ant"])
        self.honest = self.batch("ant", hub.keys["ant"])
        self.sent = self.signed(
            "GET", "/v1/state"
        )  # of an honest member, as a stranger recorded it

    def batch(self, agent: str, key: Key, step: int = 0, count: int = 4, team: str = "") -> Batch:
        made = rows(agent, step, texts=count)
        return Batch.build(key, team or self.team.id, agent, step, made, "all", None)

    def signed(self, method: str, path: str, body: bytes = b"", **fields: Any) -> Request:
        """A request that the hostile member signs; `fields` change the sender."""
        sender = Sender(**{**self.sender.__dict__, **fields})
        return method, path, sender.headers(method, path, body), body

    def put(self, batch: bytes, step: int = 0, **fields: Any) -> Request:
        return self.signed("PUT", f"/v1/steps/{step}/batch", batch, **fields)

    # ------------------------------------------------------------ a stranger

    def stranger(self) -> Iterator[Callable[[], Request]]:
        key, pick = Key.new(), self.draw.choice
        batch = self.batch("bee", key).encode()
        yield lambda: self.put(batch, name="bee", key=key)
        yield lambda: self.put(batch, name="stranger", key=key)
        yield lambda: self.sent
        yield lambda: (*self.sent[:2], {}, b"")
        yield lambda: ("GET", "/v1/proofs", self.sent[2], b"")
        yield lambda: ("PUT", "/v1/steps/0/batch", self.sent[2], self.honest.encode())
        yield lambda: (
            *self.sent[:2],
            self.mutated_headers(self.signed("GET", "/v1/state")[2]),
            b"",
        )
        yield lambda: (*self.sent[:2], {"Hacrl-Member": "x" * self.draw.randrange(50_000)}, b"")
        yield lambda: ("POST", "/v1/amendments", {}, self.amendment(key, "founder").encode())
        yield lambda: (
            "POST",
            "/v1/amendments",
            {},
            pick([b"[" * 200_000, b"{}", b"", b"\xff" * 999]),
        )
        yield lambda: ("POST", "/v1/amendments", {}, b"0" * 400_000)
        yield lambda: (pick(["GET", "PUT", "DELETE", "PATCH"]), pick(ODD_PATHS), {}, b"")

    def mutated_headers(self, headers: dict[str, str]) -> dict[str, str]:
        name = self.draw.choice(sorted(headers))
        at = self.draw.randrange(len(headers[name]))
        new = self.draw.choice([c for c in "0123456789abcdefZ" if c != headers[name][at]])
        return headers | {name: headers[name][:at] + new + headers[name][at + 1 :]}

    def amendment(self, key: Key, signer: str) -> Signed:
        kind = self.draw.choice(["join", "expel", "rotate"])
        fields: dict[str, Any] = {"member": "sybil" if kind == "join" else "bee", "step": 1}
        if kind != "expel":
            fields["key"] = Key.new().public
        link = {"team": self.team.id, "number": 0, "previous": self.team.id, "kind": kind}
        level = "all" if kind == "join" else None
        content = {"key": None, "publish": level, "signer": signer, **fields, **link}
        return key.sign("amendment", content)

    # ------------------------------------------------------------ a hostile member

    def member(self) -> Iterator[Callable[[], Request]]:
        own, draw = self.hub.keys["ant"], self.draw
        team = sha256(b"another team")
        yield lambda: self.put(self.batch("bee", own).encode())
        yield lambda: self.put(self.batch("bee", own).encode(), name="bee")
        yield lambda: self.put(self.batch("ant", Key.new()).encode())
        yield lambda: self.put(self.batch("ant", own, team=team).encode())
        yield lambda: self.put(self.batch("ant", own, step=draw.randrange(1, 9)).encode())
        yield lambda: self.put(self.batch("ant", own, step=3).encode(), step=3)
        yield lambda: self.put(self.batch("ant", own, count=draw.randrange(17, 60)).encode())
        yield lambda: self.put(self.mutated(self.honest.encode()))
        yield lambda: self.put(self.honest.encode()[: -draw.randrange(1, 900)])
        yield lambda: self.put(self.container(BOMB))
        yield lambda: self.put(self.container(b"\0" * draw.randrange(1000, 500_000)))
        yield lambda: self.put(self.container(gzip.compress(self.honest.texts) * 2))
        yield lambda: self.put(b"[" * draw.randrange(1, 300_000) + b"\n")
        yield lambda: self.put(draw.randbytes(draw.randrange(1, 3000)))
        yield lambda: (*self.put(self.honest.encode())[:3], self.honest.encode() + b"x")
        yield lambda: self.signed("PUT", "/v1/steps/0/skip", self.skip("bee", own))
        yield lambda: self.signed("PUT", "/v1/steps/1/skip", self.skip("ant", own, 1))
        yield lambda: self.signed("GET", "/v1/steps/0/envelopes")
        yield lambda: self.signed(
            "GET", f"/v1/steps/0/parts/{self.honest.envelope.content['texts']}"
        )
        yield lambda: self.signed("GET", "/v1/data/../hub.key")
        yield lambda: ("POST", "/v1/amendments", {}, self.amendment(own, "member").encode())
        yield lambda: self.put(self.with_head())

    def mutated(self, body: bytes) -> bytes:
        """One byte changed, in the first line or in the data of a part: never in the header of gzip or
        in its last block, which do not change the lines."""
        line = body.index(b"\n")
        second = line + 1 + len(gzip.compress(self.honest.outcomes, 1, mtime=0))
        spans = [(0, line), (line + 12, second - 12), (second + 11, len(body) - 12)]
        at = self.draw.randrange(*self.draw.choice(spans))
        return body[:at] + bytes([body[at] ^ self.draw.randrange(1, 256)]) + body[at + 1 :]

    def container(self, texts: bytes) -> bytes:
        outcomes = gzip.compress(self.honest.outcomes, 1, mtime=0)
        line = {"envelope": self.honest.envelope.plain(), "outcomes": len(outcomes)}
        return canonical(line | {"texts": len(texts)}) + b"\n" + outcomes + texts

    def skip(self, agent: str, key: Key, step: int = 0) -> bytes:
        content = {"team": self.team.id, "agent": agent, "step": step}
        return key.sign("skip", content).encode()

    def with_head(self) -> bytes:
        """A batch that names a snapshot which the hub never signed."""
        head = self.hub.keys["ant"].sign("snapshot", {"step": 0, "team": self.team.id})
        content = {**self.honest.envelope.content, "head": head.plain()}
        envelope = self.hub.keys["ant"].sign("envelope", content)
        return Batch(envelope, self.honest.outcomes, self.honest.texts).encode()


def storm(count: int, seed: int, database: str | None = None) -> list[str]:
    """Send `count` requests of each kind of attacker in equal parts; return the findings."""
    findings: list[str] = []
    answers: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, HubProcess(Path(folder), database) as hub:
        attack = Attack(hub, random.Random(seed))
        kinds = [("stranger", k) for k in attack.stranger()] + [
            ("member", k) for k in attack.member()
        ]
        with httpx.Client(timeout=SECONDS) as http:
            method, path, headers, body = attack.sent
            assert http.request(method, hub.url + path, headers=headers).status_code == 200
            began, longest = time.monotonic(), 0.0
            for number in range(count):
                who, make = kinds[number % len(kinds)]
                method, path, headers, body = make()
                sent = time.monotonic()
                try:
                    answer = http.request(method, hub.url + path, headers=headers, content=body)
                    status = answer.status_code
                except httpx.TransportError as error:  # the hub may close the connection
                    status = 400 if not isinstance(error, httpx.TimeoutException) else 599
                longest = max(longest, time.monotonic() - sent)
                answers[f"{who} {status}"] += 1
                if status < 400 or status >= 500:
                    findings.append(f"{number}: {who}, kind {number % len(kinds)}: status {status}")
                if who == "member" and number % 20 == 0:
                    time.sleep(0.05)  # below the limit of the member's own rate
        seconds = time.monotonic() - began
        findings += after(hub)
        memory = hub.metrics()["hacrl_hub_memory_bytes"]
        if memory > MEMORY:
            findings.append(f"the hub has {memory / 1e6:.0f} MB")
    counts = dict(sorted(answers.items()))
    print(f"{count} requests in {seconds:.1f} s, the longest {longest:.2f} s")
    print(f"hub {memory / 1e6:.0f} MB; {counts}")
    return findings


def after(hub: HubProcess) -> list[str]:
    """Close the step with honest batches; return what is wrong with the snapshot and the team."""
    clients = {name: hub.client(name, patience=60.0) for name in NAMES}
    batches = {name: hub.batch(client, 0) for name, client in clients.items()}
    for name, client in clients.items():
        client.put(batches[name])
    found = [client.snapshot(0) for client in clients.values()]
    wrong = []
    expected = {n: b.envelope.digest for n, b in batches.items()}
    for header in found:
        assert header is not None
        if {n: b["envelope"] for n, b in header.content["batches"].items()} != expected:
            wrong.append(f"the snapshot is {header.content['batches']}")
    if {e.envelope.agent: e.signed.digest for e in clients["bee"].envelopes(0)} != expected:
        wrong.append("the list of batches has others")
    if clients["bee"].team.chain:
        wrong.append("an amendment was accepted")
    if (hub.folder / "hub.log").read_text().count("Traceback"):
        wrong.append((hub.folder / "hub.log").read_text()[-2000:])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", help="URL, or postgres to start a server (default: SQLite)")
    args = parser.parse_args()
    with ExitStack() as stack:
        database = args.database
        if database == "postgres":
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            database = stack.enter_context(postgres_server(place))("requests")
        findings = storm(args.count, args.seed, database)
    print("\n".join(findings) or "none accepted")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
