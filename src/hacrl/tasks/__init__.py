"""Where problems come from.

A task gives the same problems for the same seed and step to every agent, and keeps its held-out
problems out of training. A new task is one file and one entry in TASKS, or an import path
`package.module:factory` in the config, called like the entries here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hacrl.importing import import_object
from hacrl.tasks.settings import TaskConfig
from hacrl.types import Problem

__all__ = ["TASKS", "Task", "TaskConfig", "make_task"]


class Task(Protocol):
    """A source of problems.

    Example: make_task(TaskConfig(kind="arithmetic"), seed=0, base=Path(".")).batch(3, 32)
    """

    name: str

    def batch(self, step: int, count: int) -> list[Problem]:
        """The training problems of a step, none twice: a pure function of seed, step and count."""
        ...

    def held_out(self, count: int | None) -> list[Problem]:
        """Problems that training never sees, the same for every seed; None means all of them."""
        ...


def _arithmetic(config: TaskConfig, seed: int, base: Path) -> Task:
    from hacrl.tasks.arithmetic import ArithmeticTask

    return ArithmeticTask(seed, config.operations)


def _files(config: TaskConfig, seed: int, base: Path) -> Task:
    from hacrl.tasks.dataset import file_task

    return file_task(config, seed, base)


def _hub(config: TaskConfig, seed: int, base: Path) -> Task:
    from hacrl.tasks.dataset import hub_task

    return hub_task(config, seed, base)


def _gym(config: TaskConfig, seed: int, base: Path) -> Task:
    from hacrl.tasks.gym import gym_task

    return gym_task(config, seed)


TASKS: dict[str, Callable[[TaskConfig, int, Path], Task]] = {
    "arithmetic": _arithmetic,
    "jsonl": _files,
    "parquet": _files,
    "hub": _hub,
    "gym": _gym,
}


def make_task(config: TaskConfig, seed: int, base: Path) -> Task:
    """The task a config asks for; relative paths in it are looked up in `base`."""
    factory = TASKS.get(config.kind)
    if factory is None:  # settings.py has checked that it is an import path
        factory = import_object(config.kind, "task.kind")
    return factory(config, seed, base)
