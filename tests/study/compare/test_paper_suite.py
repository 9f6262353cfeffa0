"""The paper's suites: settings, plan, and the whole path with tiny models in Table 1's form."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tomli_w
from cli_helpers import accepted, hacrl

from hacrl.config import load_config
from hacrl.config_file import read_toml
from hacrl.store.rows import write_object
from hacrl.study.benchmarks.catalogue import MATH7
from hacrl.study.compare.plan import PlanRow, make_plan, plan_table
from hacrl.study.compare.suite import load_suite, make_runs

CONFIGS = Path(__file__).parents[3] / "configs"
PAPER, ABLATIONS = (CONFIGS / "suites" / f"{name}.toml" for name in ("paper", "paper-ablations"))
TINY = """agents.0.model=pocket:wren agents.1.model=pocket:finch task={kind="arithmetic"} steps=1
verifier={kind="number",workers=0} prompts_per_step=2 minibatch_samples=16 max_prompt_tokens=128
max_response_tokens=16 evaluation.problems=4 evaluation.max_response_tokens=16 log.tensorboard=false
benchmarks.max_response_tokens=16 benchmarks.prompt={question} benchmarks.samples={aime25=2}"""


def test_the_runs_are_those_of_the_presets(tmp_path: Path) -> None:
    """Every team and arm equals the preset of the pair with the arm's file, but for the seed."""
    presets = {
        tuple(a.name for a in config.agents): path
        for path in (CONFIGS / "paper").glob("*.toml")
        if (config := load_config(path))
    }
    runs = make_runs(load_suite(PAPER), tmp_path)
    assert len(runs) == 30 and {len(run.config.agents) for run in runs} == {2}
    for run in runs:
        preset = presets[tuple(a.name for a in run.config.agents)]
        arm = [] if run.arm == "hacpo" else [f"+{run.arm}"]
        assert run.config == load_config(preset, [*arm, "seed=1"]), run.name


def test_every_ablation_changes_one_thing(tmp_path: Path) -> None:
    runs = {run.arm: run.config for run in make_runs(load_suite(ABLATIONS), tmp_path)}
    full = runs["hacpo"].algorithm.model_dump()
    changed = {
        arm: {k: v for k, v in config.algorithm.model_dump().items() if v != full[k]}
        for arm, config in runs.items()
    }
    assert changed == {
        "hacpo": {},
        "no-capability-baseline": {"capability_baseline": False},
        "no-weight": {"capability_weight": False},
        "alpha0": {"alpha": 0},
        "alpha2": {"alpha": 2},
        "alpha3": {"alpha": 3},
        "no-clipping": {"floor": 1e-6, "last_floor": 1e-6, "ceiling": 1e6},
        "no-stepwise": {"last_floor": 0.8},
    }


def test_the_plan_by_hand(tmp_path: Path) -> None:
    """Qwen3-1.7B + 4B, hacpo, 58 steps, 1,024 rollouts of each agent in a step. Seconds of a step:
    1,024 x 700 x (53 + 20.4 + 53 + 48) us + 2,048 x 700 x (30 + 23.8 + 30 + 56) us = 125.0 + 200.4.
    Evaluation: 6 x 500 replies and 8,706 of the benchmarks, 700 x 174.4 us each: 1,429 s."""
    rows = {(r.team, r.arm): r for r in make_plan(PAPER, tmp_path)}
    row = rows["size-1.7b-4b", "hacpo"]
    assert (row.runs, row.steps, row.rollouts) == (1, 58, 58 * 2048)
    assert row.hours == pytest.approx((58 * (125.0 + 200.4) + 1429) / 3600, rel=2e-3)
    assert rows["size-1.7b-4b", "gspo_x2"].rollouts == 2 * row.rollouts
    assert "unknown" in row.memory


@pytest.mark.parametrize(
    ("hours", "total"), [((5.2, 3), "8.2"), ((5.2, None), "> 5.2"), ((None, None), "unknown")]
)
def test_a_total_of_unknown_hours_says_so(hours: tuple[float | None, ...], total: str) -> None:
    rows = [PlanRow("pair", "hacpo", 1, 58, 1024, "131 GB", h) for h in hours]
    assert [*plan_table(rows).columns[5].cells][-1] == total


def test_the_command_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    out, _ = accepted("compare", PAPER, "--plan", "--out", tmp_path / "out", *TINY.split())
    assert "GPU hours" in out and "about" in out  # the memory of pocket models is known
    assert not (tmp_path / "out").exists()


def test_the_whole_path_ends_with_the_table(tmp_path: Path) -> None:
    """One team of the suite with pocket models: train, benchmarks, Table 1's form, once."""
    tree = read_toml(PAPER)
    tree["base"] = str(CONFIGS / "paper" / Path(tree["base"]).name)
    tree["teams"], tree["arms"] = tree["teams"][:1], tree["arms"][1:3]
    tree["published"] = {"state-4b": {"qwen3-4b": {"gspo": {"math500": 61.5, "mean": 40}}}}
    (tmp_path / "paper.toml").write_text(tomli_w.dumps(tree))
    command = ["compare", tmp_path / "paper.toml", "--out", tmp_path / "out", *TINY.split()]
    code, _, err = hacrl(*command, f"benchmarks.data={tmp_path}")
    assert code == 2 and "hacrl data fetch" in err and not (tmp_path / "out").exists()
    for benchmark in MATH7:
        rows = [{"id": f"{i}", "question": f"{i}+1", "answer": f"{i + 1}"} for i in range(2)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{benchmark.name}.jsonl").write_text(text)

    code, out, err = hacrl(*command, f"benchmarks.data={tmp_path}")

    assert code == 0, err
    assert "benchmarks: state-4b/gspo/seed-1" in err and "published figures" in out
    for benchmark in MATH7:
        assert benchmark.title in out
    assert "(61.5)" in out and "(40)" in out
    rows = json.loads((tmp_path / "out/results.json").read_text())["benchmarks"]
    assert [(r["agent"], r["arm"]) for r in rows] == [
        (agent, arm) for agent in ("qwen3-4b", "qwen3-4b-instruct") for arm in ("gspo", "gspo_x2")
    ]
    folder = tmp_path / "out/runs/state-4b/gspo/seed-1/benchmarks/aime25/qwen3-4b"
    assert json.loads((folder / "settings.json").read_text())["step"] == 1
    stored = json.loads((folder / "result.json").read_text())
    assert rows[0]["scores"]["aime25"]["mean"] == stored["score"]["mean"]
    assert rows[0]["mean"] == pytest.approx(sum(s["mean"] for s in rows[0]["scores"].values()) / 7)
    code, again, err = hacrl(*command, f"benchmarks.data={tmp_path}", "--report")
    assert code == 0 and again == out, err
    alone_is_borrowed(tmp_path, tree)
    code, _, err = hacrl(*command, f"benchmarks.data={tmp_path}", "--report")
    rows = json.loads((tmp_path / "out/results.json").read_text())["benchmarks"]
    assert [(r["agent"], r["arm"]) for r in rows if r["team"] == "again"] == [
        (agent, arm) for agent in ("qwen3-4b", "qwen3-4b-instruct") for arm in ("gspo", "gspo_x2")
    ], err
    stored["settings"]["problems"] = 99
    write_object(folder / "result.json", stored)
    code, _, err = hacrl(*command, f"benchmarks.data={tmp_path}", "--report")
    assert (
        code == 2 and "problems is 99 there and" in err and "Delete the benchmarks folders" in err
    )


def alone_is_borrowed(folder: Path, tree: dict[str, Any]) -> None:
    """A second team with the same agents has a run of gspo_x2, and that of gspo from the first team."""
    tree["reference"], tree["arms"][0]["teams"] = "gspo", [tree["teams"][0]["name"]]
    tree["teams"] = [tree["teams"][0], tree["teams"][0] | {"name": "again"}]
    (folder / "paper.toml").write_text(tomli_w.dumps(tree))
    runs = folder / "out" / "runs"
    shutil.copytree(runs / "state-4b" / "gspo_x2", runs / "again" / "gspo_x2")


def test_the_published_figures_are_those_of_the_paper() -> None:
    """Every figure belongs to a team, agent, arm and benchmark of the suite. Recomputed from the rows,
    HACPO is 2.65 points above GSPO and 2.79 above GSPO x2 on average, and naive 5.4 below GSPO."""
    for path, agents in ((PAPER, 12), (ABLATIONS, 2)):
        suite = load_suite(path)
        arms = {arm.name for arm in suite.arms}
        teams = {(r.team, a.name) for r in make_runs(suite, Path()) for a in r.config.agents}
        found = {(t, a): rows for t, by in suite.published.items() for a, rows in by.items()}
        assert found.keys() == teams and len(found) == agents
        for rows in found.values():
            assert rows.keys() <= arms
            assert all([*row] == [*(b.name for b in MATH7), "mean"] for row in rows.values())
    published = load_suite(PAPER).published
    means = [
        {arm: fmean(row[b.name] for b in MATH7) for arm, row in rows.items()}
        for by in published.values()
        for rows in by.values()
    ]
    rows = [row for by in published.values() for rows in by.values() for row in rows.values()]
    wrong = [r for r in rows if abs(fmean(r[b.name] for b in MATH7) - r["mean"]) > 0.101]
    assert (len(wrong), len(rows)) == (9, 60)  # printed averages that are not the mean of their row
    gaps = [("hacpo", "gspo", 2.65), ("hacpo", "gspo_x2", 2.79), ("naive", "gspo", -5.4)]
    for arm, other, gap in gaps:
        assert fmean(m[arm] - m[other] for m in means) == pytest.approx(gap, abs=0.05)
