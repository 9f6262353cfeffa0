"""The arithmetic task: right answers, a split that never leaks, batches without state."""

import os
import subprocess
import sys

import pytest

from hacrl.errors import UserError
from hacrl.tasks.arithmetic import ArithmeticTask, all_problems, make_problem


def test_problems_by_hand() -> None:
    """27+58 = 85, 72-45 = 27, 47*6 = 240+42 = 282."""
    problem = make_problem("add", 27, 58)
    assert (problem.id, problem.answer, problem.task) == ("add-27-58", "85", "add")
    assert [(m.role, m.content) for m in problem.messages] == [("user", "27+58")]
    assert make_problem("sub", 72, 45).answer == "27"
    assert make_problem("mul", 47, 6).answer == "282"


def test_split_is_disjoint_and_complete() -> None:
    """90*90 sums; 90*91/2 differences that are not negative; 90*8 products; a fifth held out."""
    for operation, size in {"add": 8100, "sub": 4095, "mul": 720}.items():
        train = {p.id for p in all_problems(operation, held_out=False)}
        held = {p.id for p in all_problems(operation, held_out=True)}
        assert not train & held
        assert len(train) + len(held) == size
        assert 0.15 < len(held) / size < 0.25
        seen = {p.id for p in ArithmeticTask(0).held_out(480) if p.task == operation}
        assert seen < held
        for seed in (0, 1):
            batches = [ArithmeticTask(seed).batch(step, 32) for step in range(100)]
            asked = {p.id for batch in batches for p in batch if p.task == operation}
            assert len(asked) > 300 and asked < train


def test_batch_is_a_function_of_seed_and_step() -> None:
    one, other = ArithmeticTask(7), ArithmeticTask(7)
    later = one.batch(5, 32)
    one.batch(0, 8)
    assert other.batch(5, 32) == later  # whatever was asked before
    assert other.batch(5, 8) == later[:8]
    assert other.batch(6, 32) != later
    assert ArithmeticTask(8).batch(5, 32) != later


def test_batch_does_not_depend_on_pythons_hash_seed() -> None:
    code = (
        "from hacrl.tasks.arithmetic import ArithmeticTask as T;"
        "print([p.id for p in T(3).batch(2, 24) + T(3).held_out(24)])"
    )
    path, outputs = os.pathsep.join(sys.path), set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        outputs.add(subprocess.check_output([sys.executable, "-c", code], env=environment))
    assert len(outputs) == 1 and b"add-" in outputs.pop()


def test_no_problem_twice_and_operations_in_turn() -> None:
    task = ArithmeticTask(0)
    for problems in (task.batch(0, 1500), task.held_out(480)):
        assert len({p.id for p in problems}) == len(problems)
        assert [p.task for p in problems[:6]] == ["add", "sub", "mul"] * 2
    assert {p.task for p in ArithmeticTask(0, ("mul",)).batch(0, 100)} == {"mul"}


def test_held_out_is_fixed() -> None:
    """Independent of the seed; a smaller count is a prefix; all are 3 x 161 (mul has fewest)."""
    assert len(ArithmeticTask(0).held_out(None)) == 3 * 161
    assert ArithmeticTask(0).held_out(None)[:60] == ArithmeticTask(0).held_out(60)
    assert ArithmeticTask(0).held_out(60) == ArithmeticTask(99).held_out(60)
    assert ArithmeticTask(0).held_out(10) == ArithmeticTask(0).held_out(60)[:10]


def test_bad_counts() -> None:
    task = ArithmeticTask(0)
    with pytest.raises(UserError, match="prompts_per_step = 0 is not between"):
        task.batch(0, 0)
    assert task.held_out(100_000) == task.held_out(None)
