"""The arithmetic task of the pocket team: sums, differences and products of small numbers.

    add   27+58   both 10 .. 99
    sub   72-45   both 10 .. 99, the first not the smaller
    mul   47*6    10 .. 99 times 2 .. 9

A hash of the problem's id puts it either into training or into the held-out set, so the two are
disjoint for every seed, step and count. The training problems of a step are a pure function of
(seed, step); there is no generator state.
"""

from functools import cache
from hashlib import blake2b
from itertools import islice
from operator import add, mul, sub
from pathlib import Path

from hacrl.tasks.deck import check_count
from hacrl.tasks.settings import TaskConfig
from hacrl.types import Message, Problem

OPERATIONS = {"add": ("+", add), "sub": ("-", sub), "mul": ("*", mul)}


def draw(*parts: object) -> int:
    """A 64-bit hash of the parts alone, independent of Python's hash seed."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def make_problem(operation: str, a: int, b: int) -> Problem:
    """One problem, e.g. make_problem("add", 27, 58) asks "27+58", with the answer "85"."""
    sign, compute = OPERATIONS[operation]
    return Problem(
        id=f"{operation}-{a}-{b}",
        messages=(Message("user", f"{a}{sign}{b}"),),
        answer=str(compute(a, b)),
        task=operation,
    )


@cache
def all_problems(operation: str, held_out: bool) -> tuple[Problem, ...]:
    """Every problem of one operation on one side of the split, ordered by operands. A hash holds out
    one problem in five."""
    second = range(2, 10) if operation == "mul" else range(10, 100)
    problems = (
        make_problem(operation, a, b)
        for a in range(10, 100)
        for b in second
        if operation != "sub" or a >= b
    )
    return tuple(p for p in problems if (draw("held out", p.id) % 5 == 0) == held_out)


class ArithmeticTask:
    """Two-number arithmetic with a fixed split between training and held-out problems.

    Example: ArithmeticTask(seed=0).batch(step=3, count=32) gives 32 different training problems,
    add, sub and mul in turn.
    """

    name = "arithmetic"

    def __init__(self, seed: int, operations: tuple[str, ...] = ("add", "sub", "mul")) -> None:
        self.seed = seed
        self.operations = tuple(operations)

    def batch(self, step: int, count: int) -> list[Problem]:
        """The training problems of a step, all different; a smaller count gives a prefix."""
        fewest = min(len(all_problems(o, held_out=False)) for o in self.operations)
        of = f"training problems with {', '.join(self.operations)} in equal parts"
        check_count(count, fewest * len(self.operations), of)
        taken: dict[str, Problem] = {}
        attempt = 0
        while len(taken) < count:
            operation = self.operations[len(taken) % len(self.operations)]
            problems = all_problems(operation, held_out=False)
            problem = problems[draw("batch", self.seed, step, attempt) % len(problems)]
            taken.setdefault(problem.id, problem)
            attempt += 1
        return list(taken.values())

    def held_out(self, count: int | None) -> list[Problem]:
        """The first `count` held-out problems in a fixed order, operations in turn; None gives all
        that fit into equal parts (483 for the three operations)."""
        ordered = [
            sorted(all_problems(operation, held_out=True), key=lambda p: draw("order", p.id))
            for operation in self.operations
        ]
        turns = (problem for turn in zip(*ordered, strict=False) for problem in turn)
        return list(islice(turns, count))


def arithmetic_task(config: TaskConfig, seed: int, base: Path) -> ArithmeticTask:
    """The task of `kind = "arithmetic"`."""
    return ArithmeticTask(seed)
