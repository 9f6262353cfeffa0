"""Single requests to a hub, real and forged: what is refused, and what is limited."""

import gzip
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hub_clients import MakeHub, raw, refused, sender
from hub_process import rows

from hacrl.errors import UserError
from hacrl.owners.batch import Batch, measure
from hacrl.owners.connection import Connection
from hacrl.owners.hub.gate import Gate
from hacrl.owners.hub.store import Refused
from hacrl.owners.signing import Key, Malformed, Signed, canonical, sha256

pytestmark = pytest.mark.hub


def test_requests_that_are_refused(make_hub: MakeHub) -> None:
    """Replay, wrong key, clock, team, hub, path, body: each has its code, and a 401 the hub's time."""
    hub = make_hub()
    good = sender(hub).headers("GET", "/v1/state", b"")
    assert raw(hub, good) == ""
    assert raw(hub, good) == "replay"
    assert raw(hub, {}) == "member"
    for fields in ({"key": Key.new()}, {"team": "0" * 64}, {"hub": "0" * 64}, {"name": "bee"}):
        assert raw(hub, sender(hub, **fields).headers("GET", "/v1/state", b"")) == "signature"
    assert raw(hub, sender(hub).headers("GET", "/v1/proofs", b"")) == "signature"
    assert raw(hub, sender(hub).headers("PUT", "/v1/state", b"")) == "signature"
    assert (
        raw(hub, {**sender(hub).headers("GET", "/v1/state", b""), "Hacrl-Time": "nan"}) == "headers"
    )
    body = hub.batch(hub.client("ant"), 0).encode()
    path = "/v1/steps/0/batch"
    headers = sender(hub).headers("PUT", path, body)
    assert raw(hub, headers, body + b"x", path) == "body"
    answer = httpx.get(f"{hub.url}/v1/state")
    assert answer.status_code == 401 and abs(answer.json()["time"] - time.time()) < 5


def test_requests_are_limited_by_name_and_time() -> None:
    now = [1000.0]
    gate = Gate("hub", lambda: now[0])
    for name in ("ant", "ant", "bee"):
        gate.count(name, 2, "too many requests")
    with pytest.raises(Refused, match="too many requests; wait 10 seconds"):
        gate.count("ant", 2, "too many requests")
    now[0] += 10
    gate.count("ant", 2, "too many requests")


def test_waits_are_limited_and_steps_are_read_by_their_members(make_hub: MakeHub) -> None:
    """Four waits of a member at a time; a closed connection ends its wait. bee left after step 1: it
    reads the snapshot of step 2, and no batches."""
    hub = make_hub(names=("ant", "bee"))
    signed = hub.team.amend(hub.keys["founder"], member="bee", step=1, kind="leave")
    httpx.post(f"{hub.url}/v1/amendments", content=signed.encode()).raise_for_status()
    path = "/v1/steps/0/snapshot?wait="
    request = sender(hub).headers

    def wait(seconds: int) -> str:
        return raw(hub, request("GET", f"{path}{seconds}", b""), path=f"{path}{seconds}")

    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(wait, 3) for _ in range(4)]
        time.sleep(1.5)
        assert wait(0) == "busy"
    assert [found.result() for found in waits] == ["open"] * 4
    for _ in range(4):
        headers = request("GET", f"{path}60", b"")
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{hub.url}{path}60", headers=headers, timeout=0.2)
    time.sleep(2.5)
    assert wait(0) == "open"
    far = "/v1/steps/6/snapshot"
    assert raw(hub, request("GET", far, b""), path=far) == "step"
    ant, bee = hub.client("ant"), hub.client("bee")
    for client, step in ((ant, 0), (bee, 0), (ant, 1)):
        client.put(hub.batch(client, step))
    ant.snapshot(1)
    header = bee.snapshot(1)
    assert refused(lambda: bee.envelopes(1)) == "roster"
    outcomes = header.content["batches"]["ant"]["outcomes"]
    assert refused(lambda: bee.part(1, outcomes)) == "roster"


def test_sizes_are_checked_before_parsing(make_hub: MakeHub) -> None:
    """Too many bytes, a gzip bomb, too many rows, trailing bytes, wrong digests."""
    hub = make_hub()
    ant = hub.client("ant")
    good = hub.batch(ant, 0)

    def put(outcomes: bytes, texts: bytes, envelope: Signed = good.envelope, size: int = 0) -> str:
        line = {"envelope": envelope.plain(), "outcomes": size or len(outcomes)}
        body = canonical(line | {"texts": len(texts)}) + b"\n" + outcomes + texts
        return refused(lambda: ant._send("PUT", "/v1/steps/0/batch", body))

    a, b = gzip.compress(good.outcomes), gzip.compress(good.texts)
    bomb = gzip.compress(b"x" * 50_000_000)
    assert len(bomb) < 100_000  # the compressed size alone would be accepted
    assert put(a, bomb) == "malformed"
    assert put(a, b"\0" * 500_000) == "size"
    assert put(a, b + b"x") == "malformed"
    assert put(a + a, b) == "malformed"
    assert put(a, b[:-9]) == "malformed"
    assert put(b, a) == "malformed"
    assert put(a, b, size=-1) == "malformed"
    for size in (10**9, 10**13, 10**20):
        assert put(a, b, size=size) == "malformed"  # status 400; a 500 would be sent again
    forged = Signed("envelope", {**good.envelope.content, "rows": 3}, good.envelope.signature)
    assert put(a, b, forged) == "signature"
    many = Batch.build(ant.key, hub.team.id, "ant", 0, rows("ant", 0, 40), "all", None)
    assert refused(lambda: ant.put(many)) == "rows"
    assert hub.metrics()["hacrl_hub_arrived"] == 0
    assert hub.metrics()["hacrl_hub_memory_bytes"] < 300e6
    assert ant.put(good).content["late"] is False


def test_parts_are_measured_in_little_memory() -> None:
    """Bytes that expand to 64 MiB; one byte above the limit is refused."""
    lines = (b"x" * 1023 + b"\n") * 2**16
    part, digest = gzip.compress(lines, 1), sha256(lines)
    assert len(part) < 2**20
    del lines
    tracemalloc.start()
    try:
        assert measure(part, 2**26) == (digest, 2**16, 2**26)
        with pytest.raises(Malformed, match="longer than"):
            measure(part, 2**26 - 1)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_an_answer_of_the_hub_is_bounded(
    make_hub: MakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub()
    monkeypatch.setattr("hacrl.owners.connection.MOST", 100)
    with pytest.raises(UserError, match="longer than 100 bytes"):
        Connection(hub.url).send("GET", "/v1/charter")
