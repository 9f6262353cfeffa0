"""The pool of a member: what a learner reads from the run directory after a step of the hub."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hub_process import NAMES, HubProcess, row, rows

from hacrl.errors import UserError
from hacrl.owners.batch import Batch
from hacrl.owners.pool import HubPool, merged
from hacrl.owners.signing import Signed
from hacrl.store.codec import TRAJECTORY
from hacrl.store.pool import Pool
from hacrl.trust.publish import public_rows
from hacrl.types import Finish, Sampling, Snapshot, Trajectory

pytestmark = pytest.mark.hub
MakeHub = Callable[..., HubProcess]
LEVELS = {"ant": "all", "bee": "successes", "cat": "rewards"}


def not_attempted(agent: str, step: int) -> Trajectory:
    fields = {"turns": (), "verdict": None, "mean_logprob": None, "num_tokens": 0}
    made = row(agent, step, "q9", 0, "", 0.0)
    return replace(made, finish=Finish.NOT_ATTEMPTED, sampling=Sampling(1.0, 32), **fields)


def all_rows(agent: str, step: int) -> list[Trajectory]:
    return [*rows(agent, step), not_attempted(agent, step)]


def pools(hub: HubProcess) -> dict[str, HubPool]:
    return {
        name: HubPool(hub.folder / name / "pool", hub.client(name), LEVELS[name]) for name in NAMES
    }


def published(name: str, step: int) -> list[Trajectory]:
    return public_rows(all_rows(name, step), LEVELS[name], private=True)  # type: ignore[arg-type]


def test_members_read_what_a_team_in_one_process_reads(make_hub: MakeHub, tmp_path: Path) -> None:
    hub = make_hub(levels=LEVELS, reciprocity=False)
    local = Pool(tmp_path / "local")
    made = pools(hub)

    def member(name: str) -> list[Snapshot]:
        found = []
        for step in range(2):
            made[name].publish(step, name, published(name, step))
            made[name].close(step, [name])
            found.append(made[name].snapshot(step))
        return found

    with ThreadPoolExecutor(3) as threads:
        seen = list(threads.map(member, NAMES))
    for step in range(2):
        for name in NAMES:
            local.publish(step, name, published(name, step))
        local.close(step, NAMES)
        assert {name: s[step] for name, s in zip(NAMES, seen, strict=True)} == dict.fromkeys(
            NAMES, local.snapshot(step)
        )
        assert made["ant"].members(step) == NAMES


def test_reciprocity_leaves_outcomes(make_hub: MakeHub) -> None:
    """cat publishes rewards, so it gets no texts of ant and bee, but all verdicts."""
    hub = make_hub(levels=LEVELS)
    made = pools(hub)
    for name in NAMES:
        made[name].publish(0, name, published(name, 0))
    made["cat"].close(0, [])
    made["bee"].close(0, [])
    texts = {name: {t.agent for g in made[name].snapshot(0).groups for t in g.trajectories if t.turns}
             for name in ("bee", "cat")}  # fmt: skip
    assert texts == {"bee": {"bee"}, "cat": set()}
    rewards = [
        t.reward for g in made["cat"].snapshot(0).groups for t in g.judged if t.agent == "ant"
    ]
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]


def test_publishing_again_sends_the_same_envelope(make_hub: MakeHub) -> None:
    hub = make_hub(levels=LEVELS)
    ant = pools(hub)["ant"]
    ant.publish(0, "ant", published("ant", 0))
    path = ant.client.folder / "envelopes" / "step-000000.json"
    first = path.read_bytes()
    again = pools(hub)["ant"]  # after a restart
    again.publish(0, "ant", published("ant", 0))
    assert path.read_bytes() == first
    (again.folder / "step-000000").rename(again.folder / "elsewhere")  # a lost pool, another batch
    with pytest.raises(UserError, match="was already signed"):
        again.publish(0, "ant", published("ant", 0)[:-1])


def test_a_member_that_is_too_late_learns_from_the_others(make_hub: MakeHub) -> None:
    hub = make_hub(levels=LEVELS, deadline=0.3)
    made = pools(hub)
    made["ant"].publish(0, "ant", published("ant", 0))
    made["ant"].close(0, [])
    made["bee"].publish(0, "bee", published("bee", 0))
    made["bee"].close(0, [])
    assert made["bee"].members(0) == ("ant",)
    assert any("The step is skipped" in note for note in hub.notes)


def test_late_batches_are_listed(make_hub: MakeHub) -> None:
    hub = make_hub(levels=LEVELS, deadline=0.3, staleness=1)
    made = pools(hub)
    made["ant"].publish(0, "ant", published("ant", 0))
    made["ant"].close(0, [])
    assert made["ant"].late(0) == {}
    made["bee"].publish(0, "bee", published("bee", 0))
    assert made["ant"].late(0) == {"bee": sorted(published("bee", 0), key=lambda t: t.key)}


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
    assert isinstance(batch.envelope, Signed)
