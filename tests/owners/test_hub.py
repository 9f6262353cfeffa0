"""A hub as a process, with real requests: the steps of a team, and who may read them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_clients import MakeHub, refused
from hub_process import NAMES, rows

from hacrl.owners.client import HubRefused
from hacrl.owners.signing import Signed
from hacrl.store.codec import TRAJECTORY
from hacrl.types import Status, Verdict

pytestmark = pytest.mark.hub


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
