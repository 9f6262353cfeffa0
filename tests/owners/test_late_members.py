"""Members that come late, leave, come back, or miss a deadline: every run is exact after a resume."""

import json
import time
from collections.abc import Callable

import pytest
from cli_helpers import hacrl as command
from hub_clients import MakeHub
from member_process import TEAM, MemberProcess, mine, replay, until

from hacrl.owners.signing import Key
from hacrl.store.journal import LearnerJournal
from hacrl.store.pool import Pool

pytestmark = pytest.mark.hub
MakeMember = Callable[..., MemberProcess]
QUICK = {**TEAM, "prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 12}
CHECKPOINTS = {"checkpoint": {"every": 2, "keep": 20}}
SETTINGS = {"minibatch_samples": 8, "evaluation": {"problems": 0}, **CHECKPOINTS}
LIMITS = {"max_source_fraction": 0.4, "max_source_weight": 0.2}
CAPS = {"judge_again": True, "quarantine": True, **LIMITS}


def bees_part(ant: MemberProcess, step: int) -> bool:
    """Whether bee has at most 0.4 of ant's samples of a step and 0.2 of their weight, late or not."""
    path = ant.reader().samples_folder("ant") / f"step-{step:06d}.jsonl"
    rows = [json.loads(line) for line in path.open()]
    amounts = [abs(row["advantage"] * row["weight"]) for row in rows]
    bees = [row["source"] == "bee" for row in rows]
    weight = sum(x for x, hers in zip(amounts, bees, strict=True) if hers)
    return sum(bees) <= 0.4 * len(rows) and weight <= 0.2 * sum(amounts) + 1e-9


def test_late_batches_are_used_once_and_a_resume_is_exact(
    make_hub: MakeHub, members: MakeMember
) -> None:
    """bee is slow. ant does not wait for it, uses its batches later, and repeats that exactly.

    bee's pause is longer than the deadline, so each of its batches is late on any machine. ant's steps
    take at least the deadline, so bee's batches are at most a few steps old.
    """
    steps = 16
    charter = {**QUICK, "steps": steps, "deadline": 0.5, "staleness": 4}
    hub = make_hub(**charter, names=("ant", "bee"))
    ant, bee = (
        members(hub, "ant", mine("wren", **SETTINGS, trust=CAPS)),
        members(hub, "bee", mine("finch", **SETTINGS)),
    )
    bee.pause = 0.6
    for member in (bee, ant):
        member.start()
    for member in (ant, bee):
        member.wait()
    rows = ant.reader().metric_rows("train", "ant")
    assert len(rows) == steps and all(row["late/age"] <= 4 for row in rows)
    journal, pool = LearnerJournal(ant.run / "journal" / "ant"), Pool(ant.run / "pool")
    stored = [journal.read("late", step, pool.digest(step)) for step in range(steps)]
    used = [tuple(batch) for found in stored if found for batch in found["batches"]]
    assert used and len(set(used)) == len(used)
    assert sum(row["late/batches"] for row in rows) == len(used)
    assert sum(row["late/samples"] for row in rows) > 0
    assert sum(row["late/left_out"] for row in rows) > 0
    assert all(bees_part(ant, step) for step in range(steps))
    own = [row["step"] for row in bee.reader().metric_rows("train", "bee")]
    assert {step for step, _ in used} <= set(own) and len(own) < steps  # it skips to the open step
    assert replay(ant, 2) and replay(bee, 2)


def test_members_join_leave_and_come_back_and_a_deadline_passes(
    make_hub: MakeHub, members: MakeMember
) -> None:
    """dan joins at step 5; bee leaves at 8 and is back at 12; ant is away longer than the deadline."""
    hub = make_hub(**{**QUICK, "steps": 13, "deadline": 2.0}, names=("ant", "bee", "cat"))
    key = Key.new()
    key.write(hub.folder / "dan.key")
    hub.keys["dan"] = key
    keys = {name: hub.keys[name].public for name in ("dan", "bee")}
    for kind, name, step in (("join", "dan", 5), ("leave", "bee", 8), ("join", "bee", 12)):
        new = ["--member-key", keys[name]] if kind == "join" else []
        options = [*new, "--step", str(step), "--key", hub.folder / "founder.key"]
        assert command("charter", "amend", hub.url, kind, name, *options)[0] == 0
    models = {"ant": "wren", "bee": "finch", "cat": "wren-2", "dan": "wren-3"}
    team = {n: members(hub, n, mine(m, **SETTINGS)) for n, m in models.items()}
    for member in team.values():
        member.start()
    until(lambda: hub.metrics()["hacrl_hub_open_step"] >= 2)
    team["ant"].kill()
    gone = int(hub.metrics()["hacrl_hub_open_step"])
    until(lambda: hub.metrics()["hacrl_hub_open_step"] > gone + 1)
    time.sleep(0.1)
    team["ant"].start()
    for member in team.values():
        member.wait()
    steps = {
        n: [row["step"] for row in m.reader().metric_rows("train", n)] for n, m in team.items()
    }
    here = {n: {*range(13)} for n in models} | {"dan": {*range(4, 13)}, "bee": {*range(7), 11, 12}}
    assert all(set(steps[n]) <= here[n] for n in models)
    assert len(here["ant"] - set(steps["ant"])) >= 1 and steps["ant"][-1] == 12
    assert set(steps["dan"]) and min(steps["dan"]) >= 4
    assert {7, 8, 9, 10}.isdisjoint(steps["bee"]) and {11, 12} & set(steps["bee"])
    heads = {m.log.rpartition("chain head after step 13: ")[2].strip() for m in team.values()}
    assert len(heads) == 1
    assert all(replay(member, 6) for member in team.values())
