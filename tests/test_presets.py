"""The presets of the paper: every one parses with every arm, and its step plan is the paper's."""

from pathlib import Path
from shutil import rmtree
from typing import get_args

import pytest

from hacrl.algorithms import ALGORITHMS, make_algorithm
from hacrl.algorithms.base import PeerFilter
from hacrl.config import Config, load_config
from hacrl.errors import UserError
from hacrl.study.benchmarks.catalogue import PROMPT
from hacrl.study.compare.suite import load_suite, make_runs
from hacrl.training.plan import plan_of

PAPER = Path(__file__).parents[1] / "configs" / "paper"
ARMS = ["grpo", "gspo", "gspo_x2", "naive"]
ABLATIONS = {"no-capability-baseline", "no-weight", "no-clipping", "no-stepwise"}
ABLATIONS |= {f"alpha{alpha}" for alpha in range(4)}  # tests/study/compare/test_paper_suite.py

TABLE_5 = {
    # agents: (alpha, delta as printed, delta_step)
    ("qwen3-4b", "qwen3-4b-instruct"): (3.0, 0.8, 0.01),
    ("qwen3-1.7b-base", "qwen3-4b-base"): (1.0, 0.8, 0.025),
    ("qwen3-4b-base", "qwen3-8b-base"): (3.0, 0.8, 0.025),
    ("llama3.2-1b-instruct", "llama3.2-3b-instruct"): (1.0, 0.9, 0.01),
    ("qwen3-1.7b-base", "llama3.2-1b-instruct"): (1.0, 0.8, 0.025),
    ("qwen3-4b-base", "llama3.2-3b-instruct"): (1.0, 0.8, 0.025),
}
UPDATES = {"": 4, "naive": 4, "gspo": 2, "grpo": 2, "gspo_x2": 4}
"""Updates a step: 128 x 8 / 512 = 2 alone; as many again on the peer's; 128 x 16 / 512 = 4."""


def load(path: Path, arm: str = "") -> Config:
    return load_config(path, [f"+{arm}"] if arm else [])


def presets() -> list[Path]:
    return sorted(PAPER.glob("*.toml"))


def test_the_six_pairs_and_four_arms_are_there() -> None:
    pairs = {tuple(a.name for a in load(path).agents) for path in presets()}
    assert pairs == set(TABLE_5) and len(presets()) == 6
    assert set(ARMS) | {""} == set(UPDATES)
    assert {path.stem for path in (PAPER / "arms").glob("*.toml")} == {*ARMS, *ABLATIONS}


@pytest.mark.parametrize("arm", ["", *ARMS])
@pytest.mark.parametrize("path", presets(), ids=lambda p: p.stem)
def test_the_plan_of_every_learner(path: Path, arm: str) -> None:
    config = load(path, arm)
    algorithm = make_algorithm(config.algorithm)
    assert config.algorithm.name == {"": "hacpo", "gspo_x2": "gspo"}.get(arm, arm)
    for agent in config.agents:
        plan = plan_of(config, agent, algorithm)
        assert all(plan.floors) == (not arm)  # only hacpo has a floor
        updates = plan.updates([f"p{i}" for i in range(128)], seed=0, step=0)
        assert len(updates) == UPDATES[arm]
        own = [u for u in updates if u.part == "own"]
        assert len(own) == (4 if arm == "gspo_x2" else 2)
        assert updates[: len(own)] == own  # own first
        for update in updates:
            # every update has 512 samples: 64 groups of 8, or 32 of 16
            assert len(update.problems) * config.samples_of(agent) == 512


@pytest.mark.parametrize("path", presets(), ids=lambda p: p.stem)
def test_alpha_and_floors_are_those_of_table_5(path: Path) -> None:
    """floor(m) = delta as printed + m delta_step, e.g. 0.8, 0.825, 0.85, 0.875."""
    config = load(path)
    alpha, floor, step = TABLE_5[tuple(a.name for a in config.agents)]
    assert config.algorithm.alpha == alpha
    algorithm = make_algorithm(config.algorithm)
    for agent in config.agents:
        floors = plan_of(config, agent, algorithm).floors
        assert floors == pytest.approx([floor + m * step for m in range(4)])


@pytest.mark.parametrize("arm", ["", *ARMS])
@pytest.mark.parametrize("path", presets(), ids=lambda p: p.stem)
def test_what_all_share(path: Path, arm: str) -> None:
    config = load(path, arm)
    a, e, task = config.algorithm, config.evaluation, config.task
    assert (config.steps, config.prompts_per_step, config.minibatch_samples) == (58, 128, 512)
    assert config.samples_per_prompt == (16 if arm == "gspo_x2" else 8)
    assert (config.max_prompt_tokens, config.max_response_tokens) == (1024, 4096)
    assert (config.temperature, a.beta) == (1.0, 0.001)
    if arm == "grpo":
        assert (a.token_epsilon_low, a.token_epsilon_high) == (0.2, 0.28)
    else:
        assert (a.epsilon_low, a.epsilon_high) == (3e-4, 4e-4)
        assert arm or a.capability_window == 5
    assert (e.problems, e.samples, e.max_response_tokens) == (500, 1, 8196)
    assert config.verifier.kind == "math" and task.prompt == PROMPT
    data = PAPER.parents[1] / "data"
    assert task.train == str(data / "math_train.jsonl.gz")
    assert task.held_out == str(data / "math500.jsonl")
    assert task.exclude == str(data / "known_issues.jsonl")
    assert task.exclude_kinds == ("same_question_in_test_set", "answer_incomplete")
    for agent in config.agents:
        assert (agent.learning_rate, agent.weight_decay, agent.betas) == (1e-6, 0.01, (0.9, 0.999))
        assert (agent.max_grad_norm, agent.warmup_updates, agent.lora) == (1.0, 0, None)


def test_the_suite_of_methods_has_an_arm_for_every_algorithm(tmp_path: Path) -> None:
    """And one for every filter of peers' replies; two seeds each."""
    suite = load_suite(PAPER.parents[1] / "configs" / "suites" / "methods.toml")
    configs = {run.arm: run.config for run in make_runs(suite, tmp_path)}
    assert {c.algorithm.name for c in configs.values()} == set(ALGORITHMS)
    filters = {getattr(c.algorithm, "peers", "all") for c in configs.values()}
    assert filters == set(get_args(PeerFilter))
    assert len(suite.seeds) == 2 and {c.steps for c in configs.values()} == {6}


# ---------------------------------------------------------------- overlays


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(
        'steps = 1\n[task]\nkind = "arithmetic"\n[verifier]\nkind = "number"\n'
        '[algorithm]\nalpha = 2.0\nfloor = 0.7\n[[agents]]\nname = "a"\nmodel = "pocket:wren"\n'
    )
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms" / "long.toml").write_text("steps = 9\n[algorithm]\nalpha = 3.0\n")
    return tmp_path / "small.toml"


def test_an_arm_is_laid_over(small: Path) -> None:
    """Its values replace, the rest of a table stays; overrides apply from left to right."""
    config = load_config(small, ["+long"])
    assert (config.steps, config.algorithm.alpha, config.algorithm.floor) == (9, 3.0, 0.7)
    assert load_config(small, ["+long", "steps=4"]).steps == 4
    assert load_config(small, ["steps=4", "+long"]).steps == 9


def test_an_unknown_arm_is_told(small: Path) -> None:
    for wrong in ("+short", "+", "+../small", "+arms/long"):
        with pytest.raises(UserError, match=r"there is no file .*; there are: \+long"):
            load_config(small, [wrong])
    rmtree(small.parent / "arms")
    with pytest.raises(UserError, match=r"there is no file .*; there are no others"):
        load_config(small, ["+long"])
