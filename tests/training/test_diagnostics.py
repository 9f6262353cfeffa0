"""Theory checks in whole runs: they change nothing, and a lying peer has a negative gain."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from team import NO_EVALUATION, Notes, member, team

import hacrl
from hacrl.runs import start
from hacrl.store.rundir import RunDirectory
from hacrl.study.diagnostics.baseline import Guess, baseline_metrics
from hacrl.study.diagnostics.gain import gain_metrics
from hacrl.study.inspect.summary import summarise

HERE = {"kind": "number", "workers": 0}


def without_checks(run: RunDirectory) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith("diagnostics/")}
        for row in run.metric_rows()
    ]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """wren and finch learn, a second wren is frozen; checks before steps 0 and 2."""
    folder = tmp_path_factory.mktemp("checked")
    return hacrl.train(three(every=2), folder / "run")


def three(**diagnostics: int) -> dict[str, Any]:
    return team(
        member("wren"),
        member("finch"),
        member("old", "wren", learn=False),
        verifier=HERE,
        evaluation={"every": 0, "problems": 12},
        checkpoint={"every": 2},
        diagnostics={"problems": 3, "samples": 4, **diagnostics},
    )


def test_a_run_with_checks_is_the_run_without(checked: RunDirectory, tmp_path: Path) -> None:
    plain = hacrl.train(three(every=0), tmp_path / "plain")
    assert without_checks(checked) == plain.metric_rows()
    assert not (plain.path / "diagnostics").exists()
    for agent in ("wren", "finch"):
        weights = [
            r.checkpoints(agent) / "step-000003" / "model.safetensors" for r in (checked, plain)
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_resumed_run_has_the_checks_of_an_unbroken_one(
    checked: RunDirectory, tmp_path: Path
) -> None:
    half = hacrl.train(three(every=2) | {"steps": 2}, tmp_path / "half")
    whole = hacrl.resume(half.path, steps=3)
    assert whole.metric_rows("train") == checked.metric_rows("train")


def test_checks_come_when_due_and_are_complete(checked: RunDirectory) -> None:
    """3 problems x 4 replies of the step and as many held-out ones; a frozen member has none."""
    rows = [row for row in checked.metric_rows() if row["kind"] == "train"]
    found = {(r["step"], r["agent"]) for r in rows if "diagnostics/cost/rollouts" in r}
    assert found == {(s, a) for s in (0, 2) for a in ("wren", "finch")}
    for row in rows:
        if (row["step"], row["agent"]) not in found:
            continue
        assert row["diagnostics/cost/rollouts"] == 24
        assert row["diagnostics/unseen/held_out"] == 1
        for source in ("wren", "finch", "old"):
            for figure in ("gain", "gain_se", "cosine", "gradient_norm", "update_norm"):
                assert f"diagnostics/{figure}/{source}" in row
        for name in ("own", "pooled", "capability"):
            for figure in ("bias", "bias_se", "variance", "spread_squared", "square_error"):
                assert f"diagnostics/{figure}/{name}" in row


def test_the_figures_can_be_counted_again_from_the_runs_files(checked: RunDirectory) -> None:
    for row in checked.metric_rows():
        if "diagnostics/cost/rollouts" not in row:
            continue
        path = checked.path / "diagnostics" / row["agent"] / f"step-{row['step']:06d}.json"
        stored = json.loads(path.read_text())
        fresh = {p: v.pop("fresh_rewards") for p, v in stored["baselines"].items()}
        guessed = {p: {n: Guess(*g) for n, g in v.items()} for p, v in stored["baselines"].items()}
        again = baseline_metrics(guessed, fresh) | gain_metrics(stored["unseen"]["gains"])
        assert again.items() <= row.items()


def test_their_cost_stands_apart(checked: RunDirectory) -> None:
    """The run's own rollouts are 3 steps x 24 for each agent, as without checks."""
    summary = summarise(checked)
    assert [a.rollouts for a in summary.agents] == [72, 72, 72]
    times = [json.loads(x) for x in (checked.path / "times.jsonl").read_text().splitlines()]
    assert sum(t.get("diagnostics", 0.0) for t in times) > 0
    other = ("step", "agent", "diagnostics", "evaluate", "checkpoint", "check")
    rest = sum(v for t in times for k, v in t.items() if k not in other)
    assert sum(agent.seconds for agent in summary.agents) == pytest.approx(rest)


@pytest.mark.parametrize(
    ("name", "sources"), [("gspo", {"wren"}), ("sgt", {"wren", "w2"}), ("f-tis", {"wren", "w2"})]
)
def test_other_algorithms_have_what_applies(name: str, sources: set[str], tmp_path: Path) -> None:
    """gspo takes no peer's samples; in sgt they join the own updates, in f-tis their tokens cross; the
    baselines are computed from the snapshot, whether or not the algorithm uses them."""
    config = team(
        member("wren"),
        member("w2", "wren"),
        **NO_EVALUATION | {"steps": 1, "prompts_per_step": 16, "samples_per_prompt": 2},
        algorithm={"name": name},
        verifier=HERE,
        diagnostics={"every": 1, "problems": 3, "samples": 4},
    )
    [row] = [r for r in hacrl.train(config, tmp_path / "run").metric_rows() if r["agent"] == "wren"]
    assert {k.split("/")[2] for k in row if k.startswith("diagnostics/gain/")} == sources
    assert row["diagnostics/bias/capability"] is not None


# ---------------------------------------------------------------- a peer that hurts

HONEST = """
import re

def score(completion, answer, **columns):
    found = re.findall(r"-?[0-9]+", completion)
    return float(bool(found) and found[-1] == answer)
"""
LIAR = HONEST.replace("return float(", "return 1.0 - float(")


def test_the_gain_tells_a_harmful_peer_from_a_helpful_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stored runs of the same replies of finch: one judged by the verifier, one by a verifier
    that then rewarded what is wrong. wren learns from both, naively."""
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {
        **NO_EVALUATION,
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
        "minibatch_samples": 128,
        "steps": 4,
        "verifier": {"kind": "function", "options": {"path": "rewards:score"}, "workers": 0},
    }
    for name, code in (("liar", LIAR), ("honest", HONEST)):
        sys.modules.pop("rewards", None)
        (tmp_path / "rewards.py").write_text(code + f"# {name}, so that no cached module serves\n")
        hacrl.train(team(member("finch", learning_rate=1e-30), **sizes), tmp_path / name)
    peers = [{"name": name, "replay": str(tmp_path / name)} for name in ("liar", "honest")]
    config = team(
        member("wren"),
        *peers,
        **sizes,
        diagnostics={"every": 1, "problems": 16, "samples": 16},
    )
    config["algorithm"]["name"] = "naive"
    rows = hacrl.train(config, tmp_path / "run").metric_rows()
    liar, honest = (
        sum(row.get(f"diagnostics/gain/{peer}", 0.0) for row in rows) for peer in ("liar", "honest")
    )
    assert liar < 0 < honest
    sys.modules.pop("rewards", None)


def test_a_learner_that_hardly_learns_from_its_peers_is_reported(tmp_path: Path) -> None:
    """With a floor of nearly 1 none of the others' texts is likely enough; naive has no floor."""
    strict = {"name": "hacpo", "floor": 0.999, "last_floor": 0.9999}
    for algorithm, warned in ((strict, {"wren", "finch"}), ({"name": "naive"}, set())):
        config = team(
            member("wren"),
            member("finch"),
            **NO_EVALUATION | {"steps": 6},
            verifier=HERE,
            algorithm={"epsilon_low": 3e-3, "epsilon_high": 4e-3, **algorithm},
        )
        heard = Notes()
        start(config, tmp_path / algorithm["name"], observer=heard)
        found = {
            n.split()[0] for n in heard.notes if " learns almost nothing from its peers: " in n
        }
        assert found == warned and len(heard.notes) == len(warned)
