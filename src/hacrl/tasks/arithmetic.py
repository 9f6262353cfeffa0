"""The arithmetic task of the pocket team: sums, differences and products of small numbers.

    add   27+58   both 10 .. 99
    sub   72-45   both 10 .. 99, the first not the smaller
    mul   47*6    10 .. 99 times 2 .. 9

A problem belongs either to training or to the held-out set, for ever: a hash of its id decides, so
the two are disjoint by operands whatever the seed, the step or the number asked for. Which training
problems a step gets is a pure function of (seed, step); there is no generator and no state.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from itertools import islice
from operator import add, mul, sub

from hacrl.errors import UserError
from hacrl.types import Message, Problem

HELD_OUT_ONE_IN = 5
"""One problem in five is never trained on."""

OPERATIONS = {"add": ("+", add), "sub": ("-", sub), "mul": ("*", mul)}


def draw(*parts: object) -> int:
    """A 64-bit number that depends on the parts and on nothing else (not on Python's hash seed)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(problem_id: str) -> bool:
    """True for the fixed fifth of all problems that training never sees."""
    return draw("held out", problem_id) % HELD_OUT_ONE_IN == 0


def make_problem(operation: str, a: int, b: int) -> Problem:
    """One problem, e.g. make_problem("add", 27, 58) asks "27+58" and knows "85"."""
    sign, compute = OPERATIONS[operation]
    return Problem(
        id=f"{operation}-{a}-{b}",
        messages=(Message("user", f"{a}{sign}{b}"),),
        answer=str(compute(a, b)),
        task=operation,
    )


@cache
def all_problems(operation: str, held_out: bool) -> tuple[Problem, ...]:
    """Every problem of one operation on one side of the split, in the order of the operands."""
    second = range(2, 10) if operation == "mul" else range(10, 100)
    problems = (
        make_problem(operation, a, b)
        for a in range(10, 100)
        for b in second
        if operation != "sub" or a >= b
    )
    return tuple(p for p in problems if is_held_out(p.id) == held_out)


class ArithmeticTask:
    """Two-number arithmetic with a fixed split between training and held-out problems.

    Example: ArithmeticTask(seed=0).batch(step=3, count=32) gives 32 different training problems, in
    turn of add, sub and mul; the same 32 to everyone who asks.
    """

    name = "arithmetic"

    def __init__(self, seed: int, operations: tuple[str, ...] = ("add", "sub", "mul")) -> None:
        unknown = [o for o in operations if o not in OPERATIONS]
        if unknown or not operations or len(set(operations)) < len(operations):
            raise UserError(
                f"task.operations: {list(operations)} should be one or more of "
                f"{', '.join(OPERATIONS)}, each at most once"
            )
        self.seed = seed
        self.operations = tuple(operations)

    def batch(self, step: int, count: int) -> list[Problem]:
        """The training problems of a step, none twice; a smaller count gives a prefix."""
        self._check(count, held_out=False, setting="prompts_per_step")
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
        """The first `count` of the held-out problems in a fixed order, operations in turn.

        None gives as many as there are in equal parts (483 for the three operations).
        """
        if count is not None:
            self._check(count, held_out=True, setting="the number of held-out problems")
        ordered = [
            sorted(all_problems(operation, held_out=True), key=lambda p: draw("order", p.id))
            for operation in self.operations
        ]
        turns = (problem for turn in zip(*ordered, strict=False) for problem in turn)
        return list(islice(turns, count))

    def _check(self, count: int, held_out: bool, setting: str) -> None:
        fewest = min(len(all_problems(o, held_out)) for o in self.operations)
        most = fewest * len(self.operations)
        if not 1 <= count <= most:
            side = "held-out" if held_out else "training"
            raise UserError(
                f"{setting}: {count} is not between 1 and {most}, the {side} problems that the "
                f"arithmetic task has for {', '.join(self.operations)} in equal parts"
            )
