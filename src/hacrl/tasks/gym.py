"""Problems of reasoning-gym, several datasets mixed by weight.

Each dataset gives a pool: its first `draws` problems, equal ones once, wrong golds left out. A hash
of what a problem asks puts it into training or into the held-out part. "What it asks" is the
operands where they are known: 3 * 4 and 4 * 3 are on the same side, in every dataset of a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hacrl.errors import UserError
from hacrl.tasks.dataset import normalised
from hacrl.tasks.deck import Deck, hash_number, hash_share
from hacrl.tasks.gold import gold_is_right, operand_key
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.settings import GymConfig, TaskConfig
from hacrl.types import Message, Problem


@dataclass(frozen=True)
class GymPool:
    """The problems of one dataset of a mixture.

    Example: make_pool(GymConfig(name="lcm"), held_out_share=0.2)
    """

    label: str
    weight: float
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    facts: dict[str, int]
    """draws, repeated, empty_gold, wrong_gold, train, held_out."""


class GymTask:
    """A weighted mixture of pools.

    Example: gym_task(TaskConfig(kind="gym", gym="arithmetic-ladder"), seed=0).batch(3, 64)
    """

    def __init__(self, name: str, pools: tuple[GymPool, ...], seed: int) -> None:
        self.name = name
        self.pools = pools
        self.seed = seed
        self.facts = {pool.label: pool.facts for pool in pools}
        """Sizes of the pools and what was left out of them."""
        self._decks = [Deck([p.id for p in pool.train], seed) for pool in pools]
        total = sum(pool.weight for pool in pools)
        self._shares = [pool.weight / total for pool in pools]

    def batch(self, step: int, count: int) -> list[Problem]:
        """The step's training problems, none twice, the pools one after another.

        Each pool gives its share of `count`, rounded up or down so that the shares hold over the
        steps. It deals by the rounded-up number, so that a step needs no knowledge of the others.
        """
        if count < 1:
            raise UserError(f"prompts_per_step = {count}: a step needs at least one problem")
        problems: list[Problem] = []
        for pool, deck, share, taken in zip(
            self.pools, self._decks, self._shares, self._counts(step, count), strict=True
        ):
            most = _most(share, count)
            if most > len(pool.train):
                raise UserError(
                    f"prompts_per_step = {count} takes up to {most} problems of {pool.label!r}, "
                    f"which has {len(pool.train)} for training: ask for fewer, lower its weight, "
                    "or raise its draws"
                )
            problems += [pool.train[i] for i in deck.deal(step, most)[:taken]]
        return problems

    def held_out(self, count: int | None) -> list[Problem]:
        """The held-out problems, or the first `count` with the pools taking turns."""
        size = sum(len(pool.held_out) for pool in self.pools)
        if count is None:
            return [problem for pool in self.pools for problem in pool.held_out]
        if not 1 <= count <= size:
            raise UserError(
                f"{count} held-out problems are asked for, but task {self.name!r} has {size}; ask "
                "for at most as many, or raise task.held_out_share or the draws"
            )
        turns = [
            (turn, number, problem)
            for number, pool in enumerate(self.pools)
            for turn, problem in enumerate(
                sorted(pool.held_out, key=lambda p: hash_number("sample", p.id))
            )
        ]
        return [problem for *_, problem in sorted(turns, key=lambda t: t[:2])[:count]]

    def _counts(self, step: int, count: int) -> list[int]:
        """Systematic sampling: one hashed offset for the step, each share rounded up or down with
        the right frequency, their sum always `count`."""
        offset = hash_share("mixture", self.seed, step)
        edges, reached = [0], 0.0
        for share in self._shares[:-1]:
            reached += share
            edges.append(int(reached * count + offset))
        edges.append(count)
        return [after - before for before, after in pairwise(edges)]


def gym_task(config: TaskConfig, seed: int) -> GymTask:
    """The task of `kind = "gym"`."""
    entries = config.gym
    if isinstance(entries, str):
        if entries not in MIXTURES:
            raise UserError(f"task.gym = {entries!r} is unknown; there are: {', '.join(MIXTURES)}")
        entries = MIXTURES[entries]
    labels = [entry.label or entry.name for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"task.gym: two datasets are called {label!r}; give them labels")
    pools = tuple(make_pool(entry, config.held_out_share) for entry in entries)
    _check_apart(pools)
    name = config.name or (config.gym if isinstance(config.gym, str) else "gym")
    return GymTask(name, pools, seed)


def make_pool(entry: GymConfig, held_out_share: float) -> GymPool:
    """Draws, checks and splits the problems of one dataset."""
    data = _dataset(entry)
    label = entry.label or entry.name
    template = PromptTemplate(entry.prompt, f"the prompt of {label!r} in task.gym")
    facts = {"draws": entry.draws, "repeated": 0, "empty_gold": 0, "wrong_gold": 0}
    train: list[Problem] = []
    held_out: list[Problem] = []
    seen: set[str] = set()
    for index in range(entry.draws):
        item = data[index]
        metadata, answer = item["metadata"], item["answer"]
        values = {**metadata, "question": item["question"]}
        if index == 0:
            template.check(values)
        prompt = template.render(values, f"problem {index}")
        asked = normalised(prompt)
        if asked in seen:
            facts["repeated"] += 1
            continue
        seen.add(asked)
        if not isinstance(answer, str) or not answer.strip():
            facts["empty_gold"] += 1
            continue
        if gold_is_right(entry.name, metadata, answer) is False:
            facts["wrong_gold"] += 1
            continue
        problem = Problem(
            id=f"{label}-{hash_number('gym', asked):016x}",
            messages=(Message("user", prompt),),
            answer=answer,
            task=label,
            columns={"question": item["question"], "metadata": metadata},
        )
        key = operand_key(entry.name, metadata) or asked
        (held_out if hash_share("split", key) < held_out_share else train).append(problem)
    if not train:
        raise UserError(f"task.gym: {label!r} has no training problems: {facts}; raise its draws")
    facts |= {"train": len(train), "held_out": len(held_out)}
    return GymPool(label, entry.weight, tuple(train), tuple(held_out), facts)


def _dataset(entry: GymConfig) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"task.kind = 'gym' needs the package reasoning-gym: pip install 'hacrl[gym]' ({error})"
        ) from error
    if entry.name not in DATASETS:
        near = [name for name in DATASETS if entry.name[:4] in name]
        hint = f"; near it: {', '.join(sorted(near))}" if near else ""
        raise UserError(f"task.gym: reasoning-gym has no dataset {entry.name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(
            entry.name, seed=entry.seed, size=entry.draws, **entry.settings
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"task.gym: the settings {entry.settings} do not fit {entry.name!r}: {error}"
        ) from error


def _most(share: float, count: int) -> int:
    """The most that systematic sampling can take of a share: its floor and one more, unless it is
    a whole number (up to rounding)."""
    exact = share * count
    return round(exact) if abs(exact - round(exact)) < 1e-9 else int(exact) + 1


def _check_apart(pools: tuple[GymPool, ...]) -> None:
    """No prompt may be on both sides, whichever dataset it comes from."""
    trained = {normalised(p.messages[0].content): p.id for pool in pools for p in pool.train}
    for pool in pools:
        for problem in pool.held_out:
            twin = trained.get(normalised(problem.messages[0].content))
            if twin is not None:
                raise UserError(
                    f"task.gym: {problem.id} is held out, but {twin} of the training problems asks "
                    "the same; give the two datasets the same prompt template or mix only one"
                )


def _two(name: str, label: str, digits: tuple[int, int], **settings: Any) -> GymConfig:
    low, high = digits
    sizes = {"min_terms": 2, "max_terms": 2, "min_digits": low, "max_digits": high}
    return GymConfig(
        name=name,
        label=label,
        settings={**sizes, **settings},
        prompt="Calculate {expression}.",
        draws=1500 if high == 1 else 4000,  # a pool of 1-digit problems is whole long before
    )


MIXTURES: dict[str, tuple[GymConfig, ...]] = {
    # From what a small instruct model nearly knows to what it seldom gets right.
    "arithmetic-ladder": (
        _two("products", "products-1-digit", (1, 1)),
        _two(
            "basic_arithmetic",
            "mixed-1-digit",
            (1, 1),
            operators=["+", "-", "*"],
            allow_parentheses=False,
            allow_negation=False,
        ),
        _two("chain_sum", "sums-1-digit", (1, 1)),
        GymConfig(
            name="lcm",
            label="lcm-to-10",
            settings={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 10},
            prompt="Find the least common multiple of {numbers[0]} and {numbers[1]}.",
            draws=1500,
        ),
        _two("products", "products-2-digit", (1, 2)),
        GymConfig(
            name="gcd",
            label="gcd-to-20",
            settings={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20},
            prompt="Find the greatest common divisor of {numbers[0]} and {numbers[1]}.",
            draws=1500,
        ),
        _two("chain_sum", "sums-2-digit", (2, 2)),
    )
}
"""Ready mixtures, by the name that `task.gym` may give."""
