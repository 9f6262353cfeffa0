"""Whole runs of the rivals: what each takes from its peers, checked against the run's own files."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from team import member, snapshots, team

import hacrl
from hacrl.store.rundir import RunDirectory
from hacrl.types import Status


def train(path: Path, name: str, *members: dict[str, Any], **settings: Any) -> RunDirectory:
    """One step of twelve problems: groups of 4, four updates of three problems for each learner."""
    tables = {
        "steps": 1,
        "prompts_per_step": 12,
        "evaluation": {"problems": 0},
        "checkpoint": {"every": 0},
        "algorithm": {"name": name},
    }
    return hacrl.train(team(*members, **{**tables, **settings}), path)


def right(run: RunDirectory) -> dict[str, dict[str, list[bool]]]:
    """problem -> agent -> which of its replies are right."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for group in snapshots(run, 1)[0].groups:
        for t in group.judged:
            found[group.problem_id][t.agent].append(t.verdict.status is Status.OK)
    return found


def rows(run: RunDirectory, agent: str) -> list[dict[str, Any]]:
    return run.sample_rows(0, agent)


def metrics(run: RunDirectory, agent: str) -> dict[str, Any]:
    (row,) = run.metric_rows("train", agent)
    return row


PAIR = (("wren", "finch"), ("finch", "wren"))


def test_sgt_adds_one_success_to_the_update_of_each_failed_prompt(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "sgt", member("wren"), member("finch"))
    judged = right(run)
    for learner, peer in PAIR:
        taken = [r for r in rows(run, learner) if r["source"] == peer]
        rescued = {p for p, who in judged.items() if any(who[peer]) and not any(who[learner])}
        assert taken
        assert sorted(r["problem"] for r in taken) == sorted(rescued)  # one each
        assert all(judged[r["problem"]][peer][r["index"]] for r in taken)
        assert {(r["advantage"], r["weight"], r["used"]) for r in taken} == {(1.0, 0.1, True)}
        own = [r for r in rows(run, learner) if r["source"] == learner]
        assert len(own) == 48
        update = {r["problem"]: r["update"] for r in own}
        assert all(r["update"] == update[r["problem"]] for r in taken)
        assert metrics(run, learner)["updates_planned"] == metrics(run, learner)["updates"] == 4


def test_graft_puts_the_peers_groups_last(tmp_path: Path) -> None:
    """12 groups stay 12 groups, in 4 updates; the replaced ones fill the last."""
    run = train(tmp_path / "run", "graft", member("wren"), member("finch"))
    judged = right(run)
    taken = {}
    for learner, peer in PAIR:
        found = rows(run, learner)
        place = {(r["problem"], r["source"]): r["update"] for r in found}
        taken[learner] = {p for p, source in place if source == peer}
        own = [r for r in found if r["source"] == learner]
        assert len(place) == 12 and len(own) == 4 * (12 - len(taken[learner]))
        assert all(0.8 < r["weight"] <= 1 for r in found if r["source"] == peer)  # others: refused
        assert taken[learner]
        assert metrics(run, learner)["updates_planned"] == metrics(run, learner)["updates"] == 4
        for problem in taken[learner]:
            assert not any(judged[problem][learner])
            assert any(judged[problem][peer]) and not all(judged[problem][peer])
        # Updates of three problems each: 12 - n own groups first, then the n taken ones.
        order = sorted(place, key=lambda key: (key[1] == peer, place[key]))
        assert [place[key] for key in order] == [i // 3 for i in range(12)]
    could = {
        learner: {
            p
            for p, who in judged.items()
            if not any(who[learner]) and any(who[peer]) and not all(who[peer])
        }
        for learner, peer in PAIR
    }
    smaller = min(len(could["wren"]), len(could["finch"]))
    for learner, peer in PAIR:
        counts = sorted((sum(judged[p][peer]) for p in could[learner]), reverse=True)
        least = counts[smaller - 1]
        assert taken[learner] == {p for p in could[learner] if sum(judged[p][peer]) >= least}


def test_f_tis_takes_the_tokens_of_its_own_vocabulary_as_they_are(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "f-tis", member("wren"), member("w2", "wren"), member("finch"))
    carried = {
        t.agent: t.tokens.tokenizer for g in snapshots(run, 1)[0].groups for t in g.trajectories
    }
    assert carried["wren"] == carried["w2"] != carried["finch"]
    plain = train(tmp_path / "plain", "graft", member("wren"), member("w2", "wren"))
    assert {t.tokens for g in snapshots(plain, 1)[0].groups for t in g.trajectories} == {None}
    sources = {learner: {r["source"] for r in rows(run, learner)} for learner in carried}
    assert sources == {"wren": {"wren", "w2"}, "w2": {"wren", "w2"}, "finch": {"finch"}}
    wren, finch = metrics(run, "wren"), metrics(run, "finch")
    assert wren["samples/dropped/finch"] == 48 and wren["samples/drop/other_vocabulary"] > 40
    assert finch["samples/drop/other_vocabulary"] > 0
    # Peers' blocks are planned for all and stay empty for finch, which learns from itself alone.
    assert (finch["updates"], finch["updates_planned"]) == (4, 12)
    assert wren["updates"] > 4
