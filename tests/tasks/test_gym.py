"""Mixtures of reasoning-gym datasets."""

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from hacrl.errors import UserError
from hacrl.tasks import TaskConfig, make_task
from hacrl.tasks.gym import GymPool, GymTask, make_pool, mixture
from hacrl.tasks.reference_answers import answer_is_right, evaluate, operand_key
from hacrl.tasks.settings import GymConfig
from hacrl.types import Message, Problem


def pool(label: str, weight: float, size: int) -> GymPool:
    def problems(side: str) -> tuple[Problem, ...]:
        return tuple(
            Problem(f"{label}-{side}-{i}", (Message("user", f"{label} {side} {i}"),), "1", label)
            for i in range(size)
        )

    return GymPool(label, weight, problems("train"), problems("held"), {})


def test_weights_hold_over_the_steps() -> None:
    """Weights 5, 2 and 1, 10 problems a step: 6.25, 2.5 and 1.25 a step, so 5000, 2000 and 1000 over
    800 steps. Each step rounds up or down, with a standard deviation of at most 0.5; over 800
    steps that is 14, and four of those are 57."""
    task = GymTask("mix", (pool("a", 5, 40), pool("b", 2, 40), pool("c", 1, 40)), seed=0)
    total: Counter[str] = Counter()
    for step in range(800):
        batch = task.batch(step, 10)
        assert len({p.id for p in batch}) == 10
        counts = Counter(p.task for p in batch)
        assert counts["a"] in (6, 7)
        assert counts["b"] in (2, 3)
        assert counts["c"] in (1, 2)
        total += counts
    for label, expected in {"a": 5000, "b": 2000, "c": 1000}.items():
        assert abs(total[label] - expected) < 57
    assert task.batch(7, 10) == GymTask("mix", task.pools, seed=0).batch(7, 10)
    assert task.batch(7, 10) != GymTask("mix", task.pools, seed=1).batch(7, 10)


def test_a_pool_that_is_too_small_says_so() -> None:
    task = GymTask("mix", (pool("a", 1, 40), pool("tiny", 1, 4)), seed=0)
    assert len(task.batch(0, 8)) == 8
    with pytest.raises(UserError, match=r"up to 5 problems of 'tiny', which has 4 for training"):
        task.batch(0, 10)


def test_held_out_problems_take_turns() -> None:
    task = GymTask("mix", (pool("a", 1, 4), pool("b", 9, 2)), seed=0)
    assert Counter(p.task for p in task.held_out(4)) == {"a": 2, "b": 2}
    assert Counter(p.task for p in task.held_out(6)) == {"a": 4, "b": 2}
    assert len(task.held_out(None)) == 6
    assert len(task.held_out(7)) == 6
    with pytest.raises(
        UserError, match=r"task 'mix' has no held-out problems: raise task\.held_out"
    ):
        GymTask("mix", (pool("a", 1, 0),), seed=0).held_out(4)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", 14), ("( 2 + 3 ) * -4", -20), ("7 / 2", Fraction(7, 2)), ("-(1 - 3)", 2)],
)
def test_evaluate_knows_precedence(expression: str, value: Fraction) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("dataset", "metadata", "answer", "right"),
    [
        ("basic_arithmetic", {"expression": "2 + 3 * 4"}, "20", False),
        ("basic_arithmetic", {"expression": "2 + 3 * 4"}, "14", True),
        ("chain_sum", {"expression": "4 - 9"}, "-5", True),
        ("basic_arithmetic", {"expression": "4 / 0"}, "4", False),
        ("basic_arithmetic", {"expression": "__import__('os')"}, "4", False),
        ("gcd", {"numbers": [12, 18]}, "6", True),
        ("lcm", {"numbers": [4, 6]}, "24", False),
        ("maze", {}, "3", None),
    ],
)
def test_reference_answers_are_computed_again(
    dataset: str, metadata: dict[str, Any], answer: str, right: bool | None
) -> None:
    assert answer_is_right(dataset, metadata, answer) is right


def test_operands_that_may_be_swapped_are_the_same_problem() -> None:
    def key(expression: str) -> str | None:
        return operand_key("chain_sum", {"expression": expression})

    assert key("3 + 14") == key("14 + 3")
    assert key("1 + 2 + 3") == key("3 + 1 + 2") == key("2 + (3 + 1)")
    assert key("5 * 4 + 2 - 1") == key("2 + 4 * 5 - 1") != key("5 + 4 * 2 - 1")
    assert key("3 * 14") == operand_key("products", {"expression": "14 * 3"})
    assert len({key("3 + 14"), key("3 * 14"), key("3 - 14"), key("14 - 3")}) == 4
    assert operand_key("gcd", {"numbers": [8, 6]}) == operand_key("gcd", {"numbers": [6, 8]})
    assert operand_key("gcd", {"numbers": [8, 6]}) != operand_key("lcm", {"numbers": [6, 8]})
    assert operand_key("maze", {}) is None


@pytest.fixture(scope="module")
def ladder() -> GymTask:
    pytest.importorskip("reasoning_gym")
    config = TaskConfig(kind="gym", gym="arithmetic-ladder", held_out_fraction=0.2)
    return make_task(config, 0, Path())


def test_the_ladder_asks_shortly_and_its_reference_answers_are_right(ladder: GymTask) -> None:
    """The whole pools of one-digit products and small lcms: 10 times 10 problems each."""
    assert [p.label for p in ladder.pools] == [e.label for e in mixture("arithmetic-ladder")]
    sizes = {p.label: len(p.train) + len(p.held_out) for p in ladder.pools}
    assert sizes["products-1-digit"] == sizes["lcm-to-10"] == 100
    assert sizes["sums-1-digit"] == 200
    for one in ladder.pools:
        for problem in one.train + one.held_out:
            question = problem.messages[0].content
            assert len(question) < 60
            if question.startswith("Calculate "):
                value = evaluate(question.removeprefix("Calculate ").removesuffix("."))
                assert str(value) == problem.answer
    batch = ladder.batch(3, 64)
    assert len({p.id for p in batch}) == 64
    assert min(Counter(p.task for p in batch).values()) >= 9


def test_no_operands_are_on_both_sides(ladder: GymTask) -> None:
    """Not even swapped, and not in another dataset of the mixture."""

    def keys(side: str) -> set[str | None]:
        names = {entry.label: entry.name for entry in mixture("arithmetic-ladder")}
        return {
            operand_key(names[one.label], problem.columns["metadata"])
            for one in ladder.pools
            for problem in getattr(one, side)
        }

    train, held_out = keys("train"), keys("held_out")
    assert train.isdisjoint(held_out)
    assert 0.15 < len(held_out) / len(train | held_out) < 0.25


def test_wrong_and_empty_answers_are_left_out_and_counted() -> None:
    """Both are known faults of reasoning-gym 0.1.25."""
    pytest.importorskip("reasoning_gym")
    settings = {"allow_parentheses": False, "operators": ["+", "-", "*"], "min_terms": 3}
    mixed = make_pool(GymConfig(name="basic_arithmetic", draws=200, settings=settings), 0.1)
    assert mixed.facts["wrong_answer"] > 20
    for problem in mixed.train:
        assert evaluate(problem.columns["metadata"]["expression"]) == int(problem.answer)
    zero = {"min_value": 0, "max_value": 1}
    bases = make_pool(GymConfig(name="base_conversion", draws=50, settings=zero), 0.1)
    assert bases.facts["empty_answer"] > 0
    total = sum(bases.facts[k] for k in ("repeated", "empty_answer", "wrong_answer"))
    assert total + bases.facts["train"] + bases.facts["held_out"] == 50


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "chain_sums"}], "no dataset 'chain_sums'; similar names: .*chain_sum"),
        ([{"name": "lcm", "settings": {"max_valu": 3}}], "settings .* do not fit 'lcm'"),
        ([{"name": "lcm", "settings": {"min_value": 0}}], "settings .* do not fit 'lcm'"),
        ([{"name": "lcm", "prompt": "{expression}"}], "no column 'expression'; .*numbers"),
        ([{"name": "lcm"}, {"name": "lcm"}], "two datasets have the name 'lcm'"),
        ("ladder", "'ladder' is unknown; choose one of: arithmetic-ladder"),
    ],
)
def test_gym_settings_that_do_not_fit(entries: Any, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        make_task(TaskConfig(kind="gym", gym=entries), 0, Path())
