"""The pool of a member: what a learner reads from the run directory after a step of the hub."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hub_process import NAMES, HubProcess, row, rows

from hacrl.errors import UserError
from hacrl.owners.batch import Batch
from hacrl.owners.pool import HubPool, merged
from hacrl.store.codec import TRAJECTORY

pytestmark = pytest.mark.hub
MakeHub = Callable[..., HubProcess]


def pools(hub: HubProcess) -> dict[str, HubPool]:
    return {name: HubPool(hub.folder / name / "pool", hub.client(name), "all") for name in NAMES}


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
