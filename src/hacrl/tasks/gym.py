"""Problems of reasoning-gym, several datasets mixed by weight.

Each dataset gives a pool: its first `draws` problems without duplicates and without wrong reference
answers. A hash of a problem's operands, or of its text where the operands are unknown, puts it into
training or holds it out: 3 * 4 and 4 * 3 are on the same side in every dataset of a mixture.
"""

import difflib
import math
import tomllib
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.tasks.dataset import normalised
from hacrl.tasks.deck import Deck, hash_fraction, hash_number
from hacrl.tasks.prompt import PromptTemplate
from hacrl.tasks.reference_answers import answer_is_right, operand_key
from hacrl.tasks.settings import GymConfig, TaskConfig
from hacrl.types import Message, Problem


@dataclass(frozen=True)
class GymPool:
    """The problems of one dataset of a mixture.

    Example: make_pool(GymConfig(name="lcm"), held_out_fraction=0.2)
    """

    label: str
    weight: float
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    facts: dict[str, int]  # draws, repeated, empty_answer, wrong_answer, train, held_out


class GymTask:
    """A weighted mixture of pools.

    Example: gym_task(TaskConfig(kind="gym", gym="arithmetic-ladder"), 0, Path()).batch(3, 64)
    """

    def __init__(self, name: str, pools: tuple[GymPool, ...], seed: int) -> None:
        self.name = name
        self.pools = pools
        self.seed = seed
        self.facts = {pool.label: pool.facts for pool in pools}
        """Sizes of the pools and counts of the problems left out."""
        self.notes = [
            f"task.gym: {pool.label!r} leaves out {pool.facts['empty_answer']} of {pool.facts['draws']} "
            f"draws without an answer and {pool.facts['wrong_answer']} with a wrong one"
            for pool in pools
            if pool.facts.get("empty_answer") or pool.facts.get("wrong_answer")
        ]
        """Sentences about the data for the user; a run shows them. Repeated draws are normal."""
        self._decks = [Deck([p.id for p in pool.train], seed) for pool in pools]
        total = sum(pool.weight for pool in pools)
        self._fractions = [pool.weight / total for pool in pools]

    def batch(self, step: int, count: int) -> list[Problem]:
        """The step's training problems, all different, pool by pool.

        Each pool gives its fraction of `count`, rounded up or down so that the fractions hold over
        many steps. It deals by the rounded-up number, so a step is independent of the others.
        """
        problems: list[Problem] = []
        for pool, deck, fraction, taken in zip(
            self.pools, self._decks, self._fractions, self._counts(step, count), strict=True
        ):
            most = math.ceil(fraction * count - 1e-9)  # 1e-9: rounding errors
            if most > len(pool.train):
                raise UserError(
                    f"prompts_per_step = {count} takes up to {most} problems of {pool.label!r}, "
                    f"which has {len(pool.train)} for training: lower prompts_per_step or its "
                    "weight, or raise its draws"
                )
            problems += [pool.train[i] for i in deck.deal(step, most)[:taken]]
        return problems

    def held_out(self, count: int | None) -> list[Problem]:
        """All held-out problems, or the first `count` with the pools taking turns."""
        if not any(pool.held_out for pool in self.pools):
            raise UserError(
                f"task {self.name!r} has no held-out problems: raise task.held_out_fraction, or switch "
                "evaluation off with evaluation.problems=0"
            )
        if count is None:
            return [problem for pool in self.pools for problem in pool.held_out]
        ordered = [
            sorted(pool.held_out, key=lambda p: hash_number("sample", p.id)) for pool in self.pools
        ]
        turns = [p for turn in zip_longest(*ordered) for p in turn if p is not None]
        return turns[:count]

    def _counts(self, step: int, count: int) -> list[int]:
        """Problems per pool by systematic sampling: one hashed offset per step rounds each fraction
        up or down with the right frequency; the sum is always `count`."""
        offset = hash_fraction("mixture", self.seed, step)
        edges, reached = [0], 0.0
        for fraction in self._fractions[:-1]:
            reached += fraction
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
    _check_disjoint(pools)
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
    facts = {"draws": entry.draws, "repeated": 0, "empty_answer": 0, "wrong_answer": 0}
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
        fault = None
        if asked in seen:
            fault = "repeated"
        elif not isinstance(answer, str) or not answer.strip():
            fault = "empty_answer"
        elif answer_is_right(entry.name, metadata, answer) is False:
            fault = "wrong_answer"
        seen.add(asked)
        if fault is not None:
            facts[fault] += 1
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
        near = difflib.get_close_matches(entry.name, DATASETS)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise UserError(f"task.gym: reasoning-gym has no dataset {entry.name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(
            entry.name, seed=entry.seed, size=entry.draws, **entry.settings
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"task.gym: the settings {entry.settings} do not fit {entry.name!r}: {error}"
        ) from error


def _check_disjoint(pools: tuple[GymPool, ...]) -> None:
    """UserError if a prompt is on both sides of the split, in any of the datasets."""
    trained = {normalised(p.messages[0].content): p.id for pool in pools for p in pool.train}
    for problem in (problem for pool in pools for problem in pool.held_out):
        if twin := trained.get(normalised(problem.messages[0].content)):
            raise UserError(
                f"task.gym: {problem.id} is held out, but the training problem {twin} asks the "
                "same; give the two datasets the same prompt template, or use only one of them"
            )
