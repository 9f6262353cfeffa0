"""`algorithm.peers` in whole runs: which peers' replies become samples, and what stays as it was."""

from pathlib import Path

import pytest
from team import member, snapshots
from test_rivals import metrics, right, rows, train

SHARING = ["hacpo", "naive", "sgt", "graft", "f-tis", "overlap", "sapo", "luffy", "sft-success"]
PAIR = (("wren", "w2"), ("w2", "wren"))


def run_of(folder: Path, name: str, peers: str):
    """Two agents with one model, so that f-tis can use the tokens, too."""
    members = (member("wren"), member("w2", "wren"))
    return train(
        folder / f"{name}-{peers}", name, *members, algorithm={"name": name, "peers": peers}
    )


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("peers", ["successes", "failures", "where_i_failed"])
def test_only_these_replies_are_trained_on(tmp_path: Path, name: str, peers: str) -> None:
    run = run_of(tmp_path, name, peers)
    judged = right(run)
    for learner, peer in PAIR:
        theirs = [r for r in rows(run, learner) if r["source"] == peer]
        for r in theirs:
            mine, reply = judged[r["problem"]][learner], judged[r["problem"]][peer][r["index"]]
            assert {"successes": reply, "failures": not reply}.get(peers, not any(mine))
        found = metrics(run, learner)
        left = {k.rpartition("/")[2]: n for k, n in found.items() if k.startswith("samples/filter")}
        reason = {"successes": "failure", "failures": "success"}.get(peers, "not_failed")
        assert set(left) == {reason}
        replies = sum(t.agent == peer for g in snapshots(run, 1)[0].groups for t in g.trajectories)
        counted = left[reason] + found[f"samples/kept/{peer}"] + found[f"samples/dropped/{peer}"]
        assert counted == replies == 48


@pytest.mark.parametrize("name", ["hacpo", "naive", "luffy", "sapo"])
def test_advantages_are_those_without_a_filter(tmp_path: Path, name: str) -> None:
    """Baselines and capability see all rewards, whichever samples are trained on."""
    found = {
        peers: {
            (r["problem"], r["source"], r["index"]): (r["advantage"], r["weight"])
            for r in rows(run_of(tmp_path, name, peers), "wren")
        }
        for peers in ("all", "successes", "failures")
    }
    some = {**found["successes"], **found["failures"]}
    both = some.items() & found["all"].items()
    assert {key[1] for key, _ in both} == {"wren", "w2"}
    if name != "sapo":  # sapo draws among the groups that have samples left
        assert both == some.items() == found["all"].items()


def test_the_new_methods_use_what_they_say(tmp_path: Path) -> None:
    """xgrpo trains on own samples only. sapo has 12 groups, some of the peer. In luffy own and peers'
    samples of a problem share an update. sft-success has all successes of the peer."""
    runs = {n: train(tmp_path / n, n, member("wren"), member("finch")) for n in SHARING[-3:]}
    runs["xgrpo"] = train(tmp_path / "xgrpo", "xgrpo", member("wren"), member("finch"))
    assert {r["source"] for r in rows(runs["xgrpo"], "wren")} == {"wren"}
    groups = {(r["problem"], r["source"]) for r in rows(runs["sapo"], "wren")}
    own = sum(source == "wren" for _, source in groups)
    assert len(groups) == 12 and 6 <= own < 12
    place = {(r["problem"], r["update"]) for r in rows(runs["luffy"], "wren")}
    assert len(place) == 12 and {s["source"] for s in rows(runs["luffy"], "wren")} > {"wren"}
    theirs = [r for r in rows(runs["sft-success"], "wren") if r["source"] == "finch"]
    judged = right(runs["sft-success"])
    assert len(theirs) == sum(sum(who["finch"]) for who in judged.values())
