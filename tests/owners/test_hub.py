"""A hub as a process, with real requests: what members get, and what nobody gets."""

import gzip
import json
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hub_process import NAMES, HubProcess, row, rows

from hacrl.errors import UserError
from hacrl.owners.batch import Batch, measure
from hacrl.owners.client import HubClient, HubRefused
from hacrl.owners.connection import Connection, Sender
from hacrl.owners.hub.gate import Gate
from hacrl.owners.hub.store import Refused
from hacrl.owners.pool import HubPool, merged
from hacrl.owners.signing import Key, Malformed, Signed, canonical, sha256
from hacrl.store.codec import TRAJECTORY
from hacrl.store.files import write_atomic
from hacrl.types import Status, Verdict

pytestmark = pytest.mark.hub
MakeHub = Callable[..., HubProcess]


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(HubRefused) as found:
        call()
    return found.value.code


def raw(
    hub: HubProcess, headers: dict[str, str], body: bytes = b"", path: str = "/v1/state"
) -> str:
    """The code of the refusal of one request; "" if it is accepted."""
    method = "PUT" if body else "GET"
    answer = httpx.request(method, hub.url + path, content=body, headers=headers)
    return "" if answer.status_code == 200 else str(answer.json()["error"])


def sender(process: HubProcess, name: str = "ant", **fields: Any) -> Sender:
    team, key = process.team, process.keys["ant"]
    return Sender(**{"team": team.id, "hub": team.charter.hub, "name": name, "key": key} | fields)


def test_three_members_over_several_steps(any_hub: MakeHub) -> None:
    """Every member gets the same chain of snapshots and the bytes that the others published."""
    hub = any_hub()
    clients = {name: hub.client(name) for name in NAMES}

    def member(name: str) -> list[Signed]:
        client, heads = clients[name], []
        for step in range(4):
            receipt = client.put(hub.batch(client, step))
            assert receipt.content["late"] is False
            heads.append(client.snapshot(step))
            for listed in client.envelopes(step):
                sent = rows(listed.envelope.agent, step)
                texts = client.part(step, listed.envelope.texts)
                assert b"reference answer" not in texts and b"secret" not in texts
                decoded = map(TRAJECTORY.decode, texts.splitlines())
                for one, other in zip(decoded, sent, strict=True):
                    assert (one.key, one.text, one.reward) == (other.key, other.text, other.reward)
                outcomes = client.part(step, listed.envelope.outcomes).splitlines()
                second = TRAJECTORY.decode(outcomes[1])
                assert (second.problem_id, second.index, second.turns) == ("q0", 1, ())
                assert second.verdict == Verdict(1.0, Status.OK) and second.mean_logprob is None
        return heads

    with ThreadPoolExecutor(3) as threads:
        chains = list(threads.map(member, NAMES))
    assert chains[0] == chains[1] == chains[2]
    assert [h.content["previous"] for h in chains[0]] == [
        hub.team.id,
        *(h.digest for h in chains[0][:-1]),
    ]
    assert list(chains[0][3].content["batches"]) == sorted(NAMES)
    assert hub.metrics()["hacrl_hub_batches_total"] == 12
    assert hub.metrics()["hacrl_hub_open_step"] == 4


def test_a_second_batch_is_refused_and_proved(any_hub: MakeHub) -> None:
    hub = any_hub()
    ant = hub.client("ant")
    first = hub.batch(ant, 0)
    receipt = ant.put(first)
    assert ant.put(first) == receipt  # idempotent
    other = hub.batch(ant, 0, rows=rows("ant", 0, texts=6))
    for _ in range(2):
        assert refused(lambda: ant.put(other)) == "equivocation"
    (proof,) = json.loads(hub.client("bee")._send("GET", "/v1/proofs"))
    envelopes = [Signed.of("envelope", value) for value in proof["envelopes"]]
    assert [e.digest for e in envelopes] == [first.envelope.digest, other.envelope.digest]
    assert all(e.valid(hub.keys["ant"].public) for e in envelopes)


def test_commit_then_reveal(make_hub: MakeHub) -> None:
    """Nobody reads a step before it is closed, or before the own batch or skip is stored."""
    hub = make_hub(deadline=1.0, staleness=2)
    ant, bee, cat = (hub.client(name) for name in NAMES)
    ant.put(hub.batch(ant, 0))
    part = f"/v1/steps/0/parts/{hub.batch(ant, 0).envelope.content['texts']}"
    assert refused(lambda: ant._send("GET", part)) == "open"
    bee.put(hub.batch(bee, 0))
    found = ant.snapshot(0)  # the deadline closes it without cat
    assert list(found.content["batches"]) == ["ant", "bee"]
    for path in ("/v1/steps/0/snapshot", "/v1/steps/0/envelopes", part):
        assert refused(lambda path=path: cat._send("GET", path)) == "commit"
    assert cat.put(hub.batch(cat, 0)).content["late"] is True
    assert cat.snapshot(0) == found
    assert bee.snapshot(0) == found
    assert [(e.envelope.agent, e.late) for e in bee.envelopes(0)] == [
        ("ant", False),
        ("bee", False),
        ("cat", True),
    ]


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


def test_after_a_skip_and_a_look_no_batch_is_accepted(make_hub: MakeHub) -> None:
    hub = make_hub(staleness=2, reciprocity=False)
    ant, bee, cat = (hub.client(name) for name in NAMES)
    cat.skip(0)
    assert refused(lambda: cat.put(hub.batch(cat, 0))) == "skipped"
    for client in (ant, bee):
        client.put(hub.batch(client, 0))
    header = cat.snapshot(0)  # a skip counts as an arrival
    assert "cat" not in header.content["batches"]
    cat.part(0, header.content["batches"]["ant"]["texts"])
    assert refused(lambda: cat.put(hub.batch(cat, 0))) == "revealed"
    assert refused(lambda: cat.put(hub.batch(cat, 4))) == "early"


def test_reciprocity(make_hub: MakeHub) -> None:
    """A member reads texts of those that publish as much, or less; outcomes are for all."""
    levels = {"ant": "all", "bee": "successes", "cat": "rewards"}
    hub = make_hub(levels=levels)
    clients = {name: hub.client(name) for name in NAMES}
    assert refused(lambda: clients["cat"].put(hub.batch(clients["cat"], 0, "all"))) == "rows"
    for name, client in clients.items():
        client.put(hub.batch(client, 0, levels[name]))
    header = clients["ant"].snapshot(0)

    def reads(name: str, author: str, part: str) -> int | str:
        try:
            digest = header.content["batches"][author][part]
            return clients[name].part(0, digest).count(b"\n")
        except HubRefused as error:
            return error.code

    assert [[reads(n, a, "texts") for a in NAMES] for n in NAMES] == [
        [4, 2, 0],
        ["reciprocity", 2, 0],
        ["reciprocity", "reciprocity", 0],
    ]
    assert [[reads(n, a, "outcomes") for a in NAMES] for n in NAMES] == [[4, 4, 4]] * 3


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


def test_a_run_directory_belongs_to_one_team(make_hub: MakeHub) -> None:
    hub, other = make_hub(), make_hub(name="fishes")
    folder = hub.client("ant").folder
    with pytest.raises(UserError, match="is the hub of the team"):
        HubClient(Connection(other.url), "ant", other.keys["ant"], folder)


def pools(hub: HubProcess) -> dict[str, HubPool]:
    return {name: HubPool(hub.folder / name / "pool", hub.client(name)) for name in NAMES}


def test_publishing_again_sends_the_same_envelope(make_hub: MakeHub) -> None:
    hub = make_hub()
    ant = pools(hub)["ant"]
    ant.publish(0, "ant", rows("ant", 0))
    path = ant.client.folder / "envelopes" / "step-000000.json"
    first = path.read_bytes()
    again = pools(hub)["ant"]  # after a restart
    again.publish(0, "ant", rows("ant", 0))
    assert path.read_bytes() == first
    (again.folder / "step-000000").rename(again.folder / "elsewhere")  # a lost pool, another batch
    with pytest.raises(UserError, match="was already signed"):
        again.publish(0, "ant", rows("ant", 0)[:-1])


@pytest.mark.parametrize("kind", ["rotate", "level"])
def test_a_batch_is_signed_again_after_an_amendment(make_hub: MakeHub, kind: str) -> None:
    """ant's envelope of the open step has the old key or level; the hub has not accepted it."""
    hub = make_hub(names=("ant", "bee"))
    before = HubPool(hub.folder / "ant" / "pool", hub.client("ant", patience=0.0))
    url = before.client.connection.url
    assert not before.is_away(0)
    team, hub.keys["new"] = hub.team, Key.new()
    same = {"key": hub.keys["ant"].public, "publish": "rewards"}
    changes = {
        "rotate": [{"kind": "rotate", "key": hub.keys["new"].public}],
        "level": [{"kind": "leave"}, {"kind": "join", **same}],
    }[kind]
    batch = hub.batch(before.client, 0)
    write_atomic(before.client.folder / "envelopes" / "step-000000.json", batch.envelope.encode())
    for change in changes:
        signed = team.amend(hub.keys["founder"], member="ant", step=0, **change)
        team = team.amended(signed)
        httpx.post(f"{url}/v1/amendments", content=signed.encode()).raise_for_status()
    key = "new" if kind == "rotate" else "ant"
    ant = HubPool(hub.folder / "ant" / "pool", hub.client("ant", key))
    ant.publish(0, "ant", rows("ant", 0))
    bee = hub.client("bee")
    bee.put(hub.batch(bee, 0))
    bee.snapshot(0)
    (found,) = (e.envelope for e in bee.envelopes(0) if e.envelope.agent == "ant")
    assert found.published == (4 if kind == "rotate" else 0)
    ant.publish(0, "ant", rows("ant", 0))  # it is closed at the hub: the same receipt


def test_a_member_that_left_skips_its_rollout(make_hub: MakeHub) -> None:
    hub = make_hub(names=("ant", "bee"))
    ant, bee = (HubPool(hub.folder / n / "pool", hub.client(n)) for n in ("ant", "bee"))
    assert not ant.is_away(0)
    signed = hub.team.amend(hub.keys["founder"], member="ant", step=0, kind="leave")
    httpx.post(f"{hub.url}/v1/amendments", content=signed.encode()).raise_for_status()
    for name, pool in (("ant", ant), ("bee", bee)):
        pool.publish(0, name, rows(name, 0))
    for pool in (ant, bee):
        pool.close(0, [])
    assert ant.members(0) == () and bee.members(0) == ("bee",) and ant.is_away(0)


def test_late_batches_are_copied_once_and_may_be_gone(make_hub: MakeHub) -> None:
    """The hub keeps late batches as long as they are accepted, although --keep-steps is less. A member
    that is further behind goes on without them."""
    hub = make_hub(start=False, names=("ant", "bee"), deadline=0.3, staleness=2)
    hub.start("--keep-steps", "1")
    ant = HubPool(hub.folder / "ant" / "pool", hub.client("ant"))
    bee = hub.client("bee")
    for step in range(5):
        ant.publish(step, "ant", rows("ant", step))
        ant.close(step, [])
        if step < 2:
            bee.put(hub.batch(bee, step))
        if step == 2:
            assert list(ant.late(0)) == ["bee"]
    assert list(ant.late(0)) == ["bee"]  # the hub has removed it
    assert ant.late(1) == {}
    parts = list((hub.folder / "data" / "parts").rglob("*.gz"))
    assert len(parts) == 3 * 2


def test_a_member_that_is_too_late_learns_from_the_others(make_hub: MakeHub) -> None:
    hub = make_hub(deadline=0.3)
    made = pools(hub)
    made["ant"].publish(0, "ant", rows("ant", 0))
    made["ant"].close(0, [])
    made["bee"].publish(0, "bee", rows("bee", 0))
    made["bee"].close(0, [])
    assert made["bee"].members(0) == ("ant",)
    assert any("The step is skipped" in note for note in hub.notes)


def test_texts_must_fit_their_outcomes(make_hub: MakeHub) -> None:
    """A text with another verdict than its outcome, or without one, is left out; damage stays."""
    hub = make_hub(start=False)
    ant = rows("ant", 0)
    batch = Batch.build(hub.keys["ant"], hub.team.id, "ant", 0, ant, "all", None)
    outcomes, texts = batch.outcomes.splitlines(), batch.texts.splitlines()
    notes: list[str] = []
    assert list(merged(outcomes, texts, notes.append)) == texts and not notes
    liar = TRAJECTORY.encode(replace(TRAJECTORY.decode(texts[0]), verdict=ant[1].verdict))
    stranger = TRAJECTORY.encode(row("ant", 0, "other", 0, "x", 1.0))
    found = list(merged([*outcomes, b"damage"], [liar, *texts[1:], stranger], notes.append))
    assert found == [outcomes[0], *texts[1:], b"damage"]
    assert notes == ["2 published texts do not match their outcomes and are left out"]


def test_rows_end_at_line_breaks_only(make_hub: MakeHub) -> None:
    """The hub counts one row of bee; carriage returns make no more of it for ant."""
    hub = make_hub(names=("ant", "bee"))
    ant, bee = (HubPool(hub.folder / n / "pool", hub.client(n)) for n in ("ant", "bee"))
    lines = b"x\r" * 1000 + b"\n"
    batch = hub.batch(bee.client, 0, rows=rows("bee", 0, 1))
    content = {**batch.envelope.content, "outcomes": sha256(lines), "texts": sha256(b"")}
    signed = bee.client.key.sign("envelope", {**content, "published": 0})
    bee.client.put(Batch(signed, lines, b""))
    ant.publish(0, "ant", rows("ant", 0))
    ant.close(0, [])
    assert [agent for agent, _ in ant.snapshot(0).unreadable] == ["bee"]
