"""The suite file: runs, budgets, and error messages."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from hacrl.config import parse_config
from hacrl.errors import UserError
from hacrl.pocket import DEMO_SUITE
from hacrl.runs import start
from hacrl.study.compare import compare
from hacrl.study.compare.runner import run_environment
from hacrl.study.compare.suite import Run, load_suite, make_runs
from hacrl.verify.settings import CORES

ROOT = Path(__file__).parents[3]
BASE = {
    "steps": 6,
    "prompts_per_step": 8,
    "samples_per_prompt": 4,
    "minibatch_samples": 32,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number"},
    "agents": [{"name": n, "model": f"pocket:{n}"} for n in ("wren", "finch", "heron")],
}
ARMS = [{"name": "hacpo"}, {"name": "gspo", "overrides": ["algorithm.name=gspo"]}]


def write(folder: Path, **settings: Any) -> Path:
    path = folder / "suite.toml"
    tree = {"base": BASE, "seeds": [1, 2], "reference": "gspo", "arms": ARMS} | settings
    path.write_text(tomli_w.dumps(tree))
    return path


def runs(folder: Path, *changes: str, **settings: Any) -> list[Run]:
    return make_runs(load_suite(write(folder, **settings)), folder / "out", changes)


def test_arms_x_teams_x_seeds(tmp_path: Path) -> None:
    teams = [
        {"name": "pair", "agents": ["heron", "wren"], "overrides": ["agents.wren.learn=false"]},
        {"name": "one", "agents": [{"name": "ant", "model": "pocket:wren"}]},
    ]
    arms = [*ARMS, {"name": "naive", "overrides": ["algorithm.name=naive"], "teams": ["one"]}]
    found = runs(tmp_path, "temperature=0.5", teams=teams, arms=arms, overrides=["steps=3"])
    names = ("pair/hacpo", "pair/gspo", "one/hacpo", "one/gspo", "one/naive")
    assert [run.name for run in found[:5]] == [f"{name}/seed-1" for name in names]
    assert [r.config.seed for r in found] == [1] * 5 + [2] * 5
    assert {(r.config.steps, r.config.temperature) for r in found} == {(3, 0.5)}
    assert found[0].learners == ["heron"] and found[2].learners == ["ant"]
    assert [r.config.algorithm.name for r in found[:5]] == ["hacpo", "gspo"] * 2 + ["naive"]
    assert found[4].folder == tmp_path / "out/runs/one/naive/seed-1"


def test_a_changed_file_of_a_finished_run_is_named(tmp_path: Path) -> None:
    """A run of a suite whose data has one wrong answer now; a run that is not here has no inputs."""
    data = tmp_path / "data.jsonl"
    lines = [f'{{"question": "{i}+30", "answer": {i + 30}}}\n' for i in range(9)]
    data.write_text("".join(lines))
    task = {"kind": "jsonl", "train": str(data), "held_out_fraction": 0}
    limits = {"max_prompt_tokens": 32, "max_response_tokens": 8, "evaluation": {"problems": 0}}
    agents = [{"name": "wren", "model": "pocket:wren"}]
    config = parse_config({**BASE, **limits, "steps": 1, "task": task, "agents": agents})
    here, missing = (Run("t", "a", 1, tmp_path / name, config) for name in ("run", "none"))
    start(config, here.folder)
    here.check_inputs()
    data.write_text("".join(lines).replace("38", "39"))
    missing.check_inputs()
    with pytest.raises(UserError, match=r"data.jsonl has changed since t/a/seed-1 was trained"):
        here.check_inputs()


def test_an_arm_changes_agents_where_a_team_has_them(tmp_path: Path) -> None:
    """The arm's value stands over the team's and the base's; the command line's over all."""
    teams = [
        {"name": "pair", "agents": ["wren", "finch"], "overrides": ["agents.*.learning_rate=2e-4"]},
        {"name": "three"},
    ]
    changed = {"heron": {"learning_rate": 1e-5}, "wren": {"lora": {"rank": 4}}}
    arms = [*ARMS, {"name": "slow", "agents": changed}]
    found = runs(tmp_path, "agents.wren.lora.rank=8", teams=teams, arms=arms, seeds=[1])
    rates = {(r.team, r.arm): [a.learning_rate for a in r.config.agents] for r in found}
    assert rates["pair", "slow"] == rates["pair", "hacpo"] == [2e-4, 2e-4]
    assert rates["three", "slow"] == [1e-6, 1e-6, 1e-5] and rates["three", "gspo"] == [1e-6] * 3
    ranks = {r.arm: r.config.agents[0].lora.rank for r in found if r.config.agents[0].lora}
    assert ranks == {"slow": 8, "hacpo": 8, "gspo": 8}


TWICE = {"name": "twice", "overrides": ["samples_per_prompt=8"], "factor": 2}
WIDE = {"name": "wide", "overrides": ["samples_per_prompt=8"]}
ODD = {"name": "odd", "overrides": ["samples_per_prompt=5"]}
DYNAMIC = {"name": "dynamic", "overrides": ["algorithm.name=gspo-dynamic"]}
FEWER = {"name": "fewer", "overrides": ["evaluation.problems=50"]}
NEAR = {"name": "near", "overrides": ["verifier.options={tolerance=0.5}"]}
SUMS = {"name": "sums", "overrides": ['task.operations=["add"]']}
SHORT = {"name": "short", "overrides": ["max_response_tokens=8"]}
ONE_SHORT = {"name": "short", "agents": {"wren": {"max_response_tokens": 8}}}
COLUMN = {"name": "column", "overrides": ["task.columns.answer=hard"]}
SUBSET = {"name": "subset", "overrides": ["task.subset=other"]}
OTHER_SET = {"name": "other", "overrides": ["task.train=other/set"]}
HUB = {"kind": "hub", "train": "some/set", "held_out_split": "test"}
OFTEN = {"name": "often", "overrides": ["evaluation.every=1"]}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"arms": [*ARMS, WIDE, TWICE]}, {"hacpo": 6, "gspo": 6, "wide": 3, "twice": 6}),
        ({"arms": [ARMS[0], TWICE], "reference": "twice"}, {"hacpo": 6, "twice": 6}),
        ({"arms": [*ARMS, DYNAMIC, OFTEN]}, {"hacpo": 6, "gspo": 6, "dynamic": 6, "often": 6}),
    ],
)
def test_budgets_set_the_steps(tmp_path: Path, settings: Any, steps: dict[str, int]) -> None:
    """The reference draws 6 x 8 x 4 = 192 rollouts. Eight per prompt: 3 steps for as many, 6 for twice
    as many; if that arm is the reference, an arm of factor 1 has 384 / 2. Dynamic sampling draws 192
    rollouts or more in 6 steps; the report reads it within 192."""
    assert {r.arm: r.config.steps for r in runs(tmp_path, seeds=[1], **settings)} == steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": "gspo_x2"}, "reference = 'gspo_x2' is not an arm"),
        ({"seeds": [1, 1]}, "seeds: '1' is listed twice"),
        ({"seeds": [1, 11], "chosen_on": [11]}, "11 is in chosen_on"),
        ({"arms": [*ARMS, ARMS[0]]}, "arms: 'hacpo' is listed twice"),
        ({"arms": [{"name": "../up"}]}, "arms.0.name"),
        ({"arms": [*ARMS, {"name": "x", "teams": ["none"]}]}, "has the unknown team 'none'"),
        ({"arms": [*ARMS, {"name": "x", "agents": {"owl": {}}}]}, "changes agent 'owl'"),
        ({"base": "no.toml"}, "there is no file"),
        ({"referenc": "gspo"}, "referenc: unknown key; did you mean 'reference'"),
        ({"budget": "rollouts"}, "budget: no longer exists"),
        (
            {"arms": [*ARMS, {"name": "x", "factr": 2}]},
            "arms.2.factr: unknown key; did you mean 'factor'",
        ),
        ({"teams": [{"name": "t", "agents": ["owl"]}]}, "the base has no agent 'owl'"),
        ({"arms": [*ARMS, ODD]}, "192 rollouts of 'wren', and a step makes 40"),
        ({"overrides": ["evaluation.every=0"], "arms": [*ARMS, DYNAMIC]}, "set evaluation.every"),
        ({"arms": [*ARMS, DYNAMIC], "reference": "dynamic"}, "a fixed number of rollouts"),
        ({"benchmarks": "math7", "arms": [*ARMS, DYNAMIC]}, "'gspo-dynamic' is over its budget"),
        ({"overrides": ["evaluation.problems=0"]}, "nothing to compare"),
        ({"arms": [*ARMS, FEWER]}, "evaluation.problems is 200 there and 50 here"),
        ({"arms": [*ARMS, NEAR]}, "verifier.options.tolerance is None there and 0.5 here"),
        (
            {"arms": [*ARMS, SUMS]},
            "task.operations is ['add', 'sub', 'mul'] there and ['add'] here",
        ),
        ({"arms": [*ARMS, SHORT]}, "held-out token limits of finch.1 is 4096 there and 8 here"),
        ({"arms": [*ARMS, ONE_SHORT]}, "held-out token limits of wren.1 is 4096 there and 8 here"),
        ({"base": BASE | {"task": HUB}, "arms": [*ARMS, COLUMN]}, "task.columns.answer is"),
        ({"base": BASE | {"task": HUB}, "arms": [*ARMS, SUBSET]}, "task.subset is"),
        ({"base": BASE | {"task": HUB}, "arms": [*ARMS, OTHER_SET]}, "task.train is"),
        ({"overrides": ["temprature=1"]}, "did you mean 'temperature'"),
        ({"overrides": ["agents=3"]}, "agents: Input should be a valid list"),
    ],
)
def test_error_messages(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        runs(tmp_path, **settings)
    assert message in str(error.value)


SUITES = sorted((ROOT / "configs" / "suites").glob("*.toml"))


@pytest.mark.parametrize("path", [*SUITES, DEMO_SUITE], ids=lambda path: path.stem)
def test_the_suites_that_come_with_hacrl(path: Path, tmp_path: Path) -> None:
    """Every config is valid; rollouts are equal up to the factor; every plan is possible. In the demo
    the updates are equal too."""
    from hacrl.algorithms import make_algorithm
    from hacrl.training.plan import plan_of

    suite = load_suite(path)
    rollouts: dict[tuple[str, str], set[float]] = {}
    updates: dict[tuple[str, str], set[int]] = {}
    for run in make_runs(suite, tmp_path):
        config = run.config
        algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
        for agent in config.agents:
            plan = plan_of(config, agent, algorithm)
            drawn = config.steps * config.prompts_per_step * config.samples_of(agent)
            key = (run.team, agent.name)
            rollouts.setdefault(key, set()).add(drawn / suite.arm(run.arm).factor)
            updates.setdefault(key, set()).add(config.steps * len(plan.floors))
    assert all(len(values) == 1 for values in rollouts.values())
    assert path != DEMO_SUITE or [*updates.values()] == [{54}] * 3


def test_parallel_runs_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES, "16")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for parallel, cores in [(1, "16"), (3, "5"), (40, "1")]:
        found = run_environment(parallel)
        assert found["OMP_NUM_THREADS"] == found[CORES] == cores
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # a value set by the user stays
    assert run_environment(4)["OMP_NUM_THREADS"] == "3"
    for wrong in ("many", "0", "1.5"):
        monkeypatch.setenv(CORES, wrong)
        with pytest.raises(UserError, match=f"HACRL_CORES = '{wrong}'.*number of cores"):
            run_environment(2)


def test_a_missing_data_file_is_found_before_the_first_run(tmp_path: Path) -> None:
    task = {"kind": "jsonl", "train": "nowhere.jsonl", "held_out": "nowhere.jsonl"}
    with pytest.raises(UserError, match=r"nowhere\.jsonl: no such file"):
        compare(write(tmp_path, base={**BASE, "task": task}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
