"""Problems of reasoning-gym, several datasets in equal parts.

Each dataset gives a pool: its first `draws` problems without duplicates and without wrong reference
answers (reasoning-gym 0.1.25 ignores precedence in `basic_arithmetic` without parentheses). A hash of a
problem's operands, or of its text where the operands are unknown, puts it into training or holds it
out: 3 * 4 and 4 * 3 are on the same side in every dataset of a mixture.
"""

import ast
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, zip_longest
from operator import add, mul, sub, truediv
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.safe_text import plural
from hacrl.tasks.dataset import normalised
from hacrl.tasks.deck import Deck, hash_fraction, hash_number
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.settings import GymConfig, TaskConfig
from hacrl.types import Message, Problem

EXPRESSIONS = ("basic_arithmetic", "chain_sum", "products")
"""Datasets whose metadata contain an arithmetic `expression`."""
OF_NUMBERS: dict[str, Callable[..., int]] = {"gcd": math.gcd, "lcm": math.lcm}
"""Datasets whose answer is a function of the metadata's `numbers`."""
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}


@dataclass(frozen=True)
class GymPool:
    """The problems of one dataset of a mixture.

    Example: make_pool(GymConfig(name="lcm"), held_out_fraction=0.2)
    """

    label: str
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    left_out: int = 0  # draws without an answer or with a wrong one


class GymTask:
    """A mixture of pools in equal parts.

    Example: gym_task(TaskConfig(kind="gym", gym="arithmetic-ladder"), 0, Path()).batch(3, 64)
    """

    def __init__(self, name: str, pools: tuple[GymPool, ...], seed: int) -> None:
        self.name = name
        self.pools = pools
        self.seed = seed
        self.notes = [
            f"task.gym: {pool.label!r} leaves out {plural(pool.left_out, 'draw')} without an answer "
            "or with a wrong one"
            for pool in pools
            if pool.left_out
        ]
        """Sentences about the data for the user; a run shows them."""
        self._decks = [Deck([p.id for p in pool.train], seed) for pool in pools]

    def batch(self, step: int, count: int) -> list[Problem]:
        """The step's training problems, all different, pool by pool.

        Each pool gives an equal part of `count`, rounded up or down so that the parts are equal over
        many steps. It deals by the rounded-up number, so a step is independent of the others.
        """
        problems: list[Problem] = []
        most = math.ceil(count / len(self.pools) - 1e-9)  # 1e-9: rounding errors
        for pool, deck, taken in zip(
            self.pools, self._decks, self._counts(step, count), strict=True
        ):
            if most > len(pool.train):
                raise UserError(
                    f"prompts_per_step = {count} takes up to {most} problems of {pool.label!r}, "
                    f"which has {len(pool.train)} for training: lower prompts_per_step, or raise "
                    "its draws"
                )
            problems += [pool.train[i] for i in deck.deal(step, most)[:taken]]
        return problems

    def held_out(self, count: int | None) -> list[Problem]:
        """All held-out problems, or the first `count` with the pools taking turns."""
        if count is None:
            return [problem for pool in self.pools for problem in pool.held_out]
        ordered = [
            sorted(pool.held_out, key=lambda p: hash_number("sample", p.id)) for pool in self.pools
        ]
        turns = [p for turn in zip_longest(*ordered) for p in turn if p is not None]
        return turns[:count]

    def _counts(self, step: int, count: int) -> list[int]:
        """Problems per pool by systematic sampling: one hashed offset per step rounds each part
        up or down with the right frequency; the sum is always `count`."""
        offset = hash_fraction("mixture", self.seed, step)
        edges, reached = [0], 0.0
        for _ in self.pools[1:]:
            reached += 1 / len(self.pools)
            edges.append(int(reached * count + offset))
        edges.append(count)
        return [after - before for before, after in pairwise(edges)]


def gym_task(config: TaskConfig, seed: int, base: Path) -> GymTask:
    """The task of `kind = "gym"`."""
    name, entries = "gym", config.gym
    if isinstance(entries, str):
        name, entries = entries, mixture(entries)
    labels = [entry.label or entry.name for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"task.gym: two datasets have the name {label!r}; give them labels")
    pools = tuple(make_pool(entry, config.held_out_fraction) for entry in entries)
    return GymTask(config.name or name, pools, seed)


def mixture(name: str) -> tuple[GymConfig, ...]:
    """The datasets of a predefined mixture, a file in mixtures/."""
    files = {path.stem: path for path in (Path(__file__).parent / "mixtures").glob("*.toml")}
    if name not in files:
        raise UserError(f"task.gym = {name!r} is unknown; choose one of: {', '.join(files)}")
    entries = tomllib.loads(files[name].read_text())["gym"]
    return tuple(GymConfig.model_validate(entry) for entry in entries)


def make_pool(entry: GymConfig, held_out_fraction: float) -> GymPool:
    """Draw, check and split the problems of one dataset."""
    data = _dataset(entry)
    label = entry.label or entry.name
    template = PromptTemplate(entry.prompt, f"the prompt of {label!r} in task.gym")
    train: list[Problem] = []
    held_out: list[Problem] = []
    seen: set[str] = set()
    left_out = 0
    for index in range(entry.draws):
        item = data[index]
        metadata, answer = item["metadata"], item["answer"]
        values = {**metadata, "question": item["question"]}
        prompt = template.render(values, f"problem {index}")
        asked = normalised(prompt)
        if asked in seen:
            continue
        seen.add(asked)
        given = isinstance(answer, str) and answer.strip()
        if not given or answer_is_wrong(entry.name, metadata, answer):
            left_out += 1
            continue
        problem = Problem(
            id=f"{label}-{hash_number('gym', asked):016x}",
            messages=(Message("user", prompt),),
            answer=answer,
            task=label,
            columns={"question": item["question"], "metadata": metadata},
        )
        key = operand_key(entry.name, metadata) or asked
        (held_out if hash_fraction("split", key) < held_out_fraction else train).append(problem)
    if not train:
        raise UserError(f"task.gym: {label!r} has no training problems; raise its draws")
    return GymPool(label, tuple(train), tuple(held_out), left_out)


def _dataset(entry: GymConfig) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"task.kind = 'gym' needs the package reasoning-gym: pip install 'hacrl[gym]' ({error})"
        ) from error
    if entry.name not in DATASETS:
        raise UserError(f"task.gym: reasoning-gym has no dataset {entry.name!r}")
    try:
        return reasoning_gym.create_dataset(entry.name, seed=0, size=entry.draws, **entry.settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"task.gym: the settings {entry.settings} do not fit {entry.name!r}: {error}"
        ) from error


def answer_is_wrong(dataset: str, metadata: Mapping[str, Any], answer: str) -> bool:
    """Whether the reference answer differs from its value, for datasets whose value is known.

    Example: answer_is_wrong("basic_arithmetic", {"expression": "2 + 3 * 4"}, "20")
    """
    try:
        if dataset in OF_NUMBERS:
            return Fraction(answer) != OF_NUMBERS[dataset](*metadata["numbers"])
        return dataset in EXPRESSIONS and Fraction(answer) != evaluate(metadata["expression"])
    except (ValueError, ZeroDivisionError, SyntaxError):
        return True


def evaluate(expression: str) -> Fraction:
    """The exact value of + - * / and parentheses over whole numbers, by the usual precedence."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number):
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](value(left), value(right))
        raise ValueError(f"not plain arithmetic: {ast.unparse(node)}")

    return value(ast.parse(expression.strip(), mode="eval").body)


def operand_key(dataset: str, metadata: Mapping[str, Any]) -> str | None:
    """A key that is equal for problems that differ only in the order of commuting operands.

    Example: operand_key("products", {"expression": "4 * 3"}) == "3 * 4"
    """
    if dataset in OF_NUMBERS:
        return f"{dataset} of {sorted(metadata['numbers'])}"
    if dataset not in EXPRESSIONS:
        return None
    tree = ast.parse(metadata["expression"].strip(), mode="eval").body
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add | ast.Mult):
        sides = sorted((ast.unparse(tree.left), ast.unparse(tree.right)))
        return f" {'+' if isinstance(tree.op, ast.Add) else '*'} ".join(sides)
    return ast.unparse(tree)
