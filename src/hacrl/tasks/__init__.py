"""Where problems come from: built-in arithmetic, data files, hub datasets, reasoning-gym.

A task gives every agent the same problems for the same seed and step, and keeps its held-out problems
out of training. A new task is one file and one entry in TASKS (settings.py), or an import path
`package.module:factory` in the config.
"""

from pathlib import Path
from typing import Protocol

from hacrl.errors import UserError, describe
from hacrl.importing import import_object
from hacrl.tasks.settings import TASKS, TaskConfig
from hacrl.types import Problem

__all__ = ["TASKS", "Task", "TaskConfig", "make_task"]


class Task(Protocol):
    """A source of problems.

    Example: make_task(TaskConfig(kind="arithmetic"), seed=0, base=Path(".")).batch(3, 32)
    """

    name: str

    def batch(self, step: int, count: int) -> list[Problem]:
        """The training problems of a step, all different: a pure function of seed, step, count."""
        ...

    def held_out(self, count: int | None) -> list[Problem]:
        """At most `count` problems that training never sees, the same for every seed; None means
        all of them."""
        ...

    # Optional: notes, a sequence of sentences about the data that a run shows.


def make_task(config: TaskConfig, seed: int, base: Path) -> Task:
    """Build the task of a config; relative paths in it start at `base`."""
    factory = import_object(TASKS.get(config.kind, config.kind), "task.kind")
    try:
        return factory(config, seed, base)
    except Exception as error:
        if config.kind in TASKS or isinstance(error, UserError):
            raise
        raise UserError(
            f"task.kind = {config.kind!r}: factory(task_config, seed, base_folder) failed: "
            f"{describe(error)}"
        ) from error
