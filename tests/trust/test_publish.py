"""agents.*.publish and trust.reciprocity: what peers receive, and what counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rows import make_row
from team import NO_EVALUATION, member, rows, snapshots, team

import hacrl
from hacrl.store.journal import Journal
from hacrl.store.rundir import RunDirectory
from hacrl.trust import Level
from hacrl.trust.publish import public_rows, receives_texts
from hacrl.types import Finish, Status, Tokens, Verdict

SETTINGS: dict[str, Any] = {**NO_EVALUATION, "steps": 2}
REPLY = make_row("bee", tokenizer="abc", tokens=Tokens("abc", (1, 2, 3), (-0.5, -0.5, -0.5)))
ROWS = [
    REPLY,
    replace(REPLY, index=1, verdict=Verdict(0.0, Status.WRONG, "41, but 42 is right")),
    replace(REPLY, index=2, verdict=Verdict(0.0, Status.ERROR, "boom")),
    replace(REPLY, index=3, verdict=None, turns=(), finish=Finish.NOT_ATTEMPTED, tokens=None),
]


@pytest.mark.parametrize(
    ("level", "texts"), [("all", [0, 1, 2]), ("successes", [0]), ("rewards", []), ("nothing", None)]
)
def test_what_each_level_publishes(level: Level, texts: list[int] | None) -> None:
    found = public_rows(ROWS, level, private=False)
    if texts is None:
        assert found == []
        return
    assert [t.index for t in found if t.text] == texts
    assert [t.index for t in found] == [0, 1, 2, 3]  # the outcomes of all
    assert [t.verdict and (t.verdict.reward, t.verdict.status) for t in found] == [
        t.verdict and (t.verdict.reward, t.verdict.status) for t in ROWS
    ]
    for t in found:
        if t.index in texts or t.finish is Finish.NOT_ATTEMPTED:
            assert t == ROWS[t.index]
        else:
            assert (t.turns, t.mean_logprob, t.num_tokens, t.tokens) == ((), None, 0, None)
            assert t.verdict and (t.finish, t.tokenizer, t.verdict.detail) == ("withheld", "", "")


def test_reciprocity_gives_the_texts_of_those_who_publish_as_much_or_less() -> None:
    levels: list[Level] = ["nothing", "rewards", "successes", "all"]
    given = [[receives_texts(mine, theirs) for theirs in levels] for mine in levels]
    assert given == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def train(path: Path, finch: dict[str, Any] | None = None, **settings: Any) -> RunDirectory:
    agents = [member("wren"), member("finch", **(finch or {}))]
    return hacrl.train(team(*agents, **{**SETTINGS, **settings}), path)


def own_advantages(run: RunDirectory, agent: str) -> dict[tuple[str, int], float]:
    """Of the first step."""
    lines = (run.samples_folder(agent) / "step-000000.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {(r["problem"], r["index"]): r["advantage"] for r in found if r["source"] == agent}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("all") / "run")


@pytest.mark.parametrize("level", ["successes", "rewards", "nothing"])
def test_a_run_in_which_one_agent_publishes_less(
    level: str, everything: RunDirectory, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", {"publish": level})
    for step, row in enumerate(rows(run, "wren")):
        found = Journal(run.journal("finch")).read(step)
        assert found is not None
        right = sum(r.verdict is not None and r.verdict.status is Status.OK for r in found[0])
        texts = right if level == "successes" else 0
        outcomes = 0 if level == "nothing" else len(found[0])
        assert row.get("samples/kept/finch", 0) == texts  # no text is lost for another reason
        assert row["samples/drop/withheld"] == max(outcomes - texts, 0)
        assert rows(run, "finch")[step]["withheld"] == len(found[0]) - texts
        assert row["capability/finch"] is None if level == "nothing" else row["capability/finch"]
    assert [s.members for s in snapshots(run, 2)] == [("wren", "finch")] * 2
    # In the first step finch learns from the same rows: its own, complete, and wren's.
    assert rows(run, "finch")[0]["loss"] == rows(everything, "finch")[0]["loss"]
    same = own_advantages(run, "wren") == own_advantages(everything, "wren")
    assert same == (level != "nothing")  # outcomes count in wren's baseline


def test_with_a_peer_that_publishes_nothing_a_learner_learns_alone(tmp_path: Path) -> None:
    run = train(tmp_path / "run", {"publish": "nothing"})
    alone = hacrl.train(team(member("wren"), **SETTINGS), tmp_path / "alone")
    one, two = (next(r.checkpoints("wren").glob("*/model.safetensors")) for r in (run, alone))
    assert one.read_bytes() == two.read_bytes()


def test_reciprocity_hides_texts_from_a_learner_that_publishes_less(
    everything: RunDirectory, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", {"publish": "rewards"}, trust={"reciprocity": True})
    finch = rows(run, "finch")[0]
    assert finch["peers/samples"] == 0 and finch["samples/drop/withheld"] == 24
    assert own_advantages(run, "finch") == own_advantages(everything, "finch")
    both = train(tmp_path / "both", trust={"reciprocity": True})
    assert both.metric_rows() == everything.metric_rows()
