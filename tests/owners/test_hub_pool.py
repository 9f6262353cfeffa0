"""The files of a member of a hub: what its pool publishes, and what it takes from the hub."""

from dataclasses import replace

import httpx
import pytest
from hub_clients import MakeHub, pools
from hub_process import row, rows

from hacrl.errors import UserError
from hacrl.owners.batch import Batch
from hacrl.owners.client import HubClient
from hacrl.owners.connection import Connection
from hacrl.owners.pool import HubPool, merged
from hacrl.owners.signing import Key, sha256
from hacrl.store.codec import TRAJECTORY
from hacrl.store.files import write_atomic

pytestmark = pytest.mark.hub


def test_a_run_directory_belongs_to_one_team(make_hub: MakeHub) -> None:
    hub, other = make_hub(), make_hub(name="fishes")
    folder = hub.client("ant").folder
    with pytest.raises(UserError, match="is the hub of the team"):
        HubClient(Connection(other.url), "ant", other.keys["ant"], folder)


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
    ant, bee = pools(hub, ("ant", "bee")).values()
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
    ant, bee = pools(hub, ("ant", "bee")).values()
    lines = b"x\r" * 1000 + b"\n"
    batch = hub.batch(bee.client, 0, rows=rows("bee", 0, 1))
    content = {**batch.envelope.content, "outcomes": sha256(lines), "texts": sha256(b"")}
    signed = bee.client.key.sign("envelope", {**content, "published": 0})
    bee.client.put(Batch(signed, lines, b""))
    ant.publish(0, "ant", rows("ant", 0))
    ant.close(0, [])
    assert [agent for agent, _ in ant.snapshot(0).unreadable] == ["bee"]
