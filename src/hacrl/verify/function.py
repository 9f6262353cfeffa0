"""`function`: a Python function of yours as the verifier.

    # rewards.py, beside the config file
    def score(completion, answer, **columns):
        return 1.0 if answer in completion else 0.0

    [verifier]
    kind = "function"
    options = { path = "rewards:score" }

The function gets the reply as its first argument and, by name, `answer` and the other columns of the
problem's data row; without **columns only those it names. It returns a reward inside `reward_range`, or
None for "could not be judged" (ERROR: left out of credit and capability). The largest reward is OK, any
smaller one WRONG. The function runs in a worker process: it may hang or crash without harm to the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hacrl.errors import UserError
from hacrl.importing import import_object
from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import failed, right, wrong


@dataclass(frozen=True)
class FunctionVerifier:
    """Calls f(completion, **columns) -> float | None.

    Example: FunctionVerifier(path="rewards:score", reward_range=(0.0, 2.0))
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    path: str
    """Import path "module:function"; a module beside the config file needs no folder."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest reward of the function; any other value is ERROR. hacpo needs a smallest
    reward of 0 or more."""
    version: str = "1"
    """Change it when the function changes, to distinguish stored verdicts."""

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if not low < high:
            raise UserError(
                f"verifier.options.reward_range = [{low}, {high}]: the smallest must come first"
            )

    @property
    def name(self) -> str:
        return f"function({self.path.rpartition('/')[2]})"  # without the folder

    def prepare(self) -> None:
        """Import the function; UserError if that fails."""
        if not callable(self._function):
            kind = type(self._function).__name__
            raise UserError(f"verifier.options.path = {self.path!r} is a {kind}, not a function")

    def judge(self, reply: str, problem: Problem) -> Verdict:
        columns = {**problem.columns, "answer": problem.answer}
        columns.pop("completion", None)
        if self._names is not None:
            columns = {name: columns[name] for name in self._names if name in columns}
        reward = self._function(reply, **columns)
        if reward is None:
            return failed("the function returned None: not judged")
        reward = float(reward)
        return (right if reward >= self.reward_range[1] else wrong)(f"{reward:g}", reward)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return import_object(self.path, "verifier.options.path")

    @cached_property
    def _names(self) -> list[str] | None:
        """The columns that the function names; None if it takes all."""
        kinds = inspect.Parameter
        parameters = list(inspect.signature(self._function).parameters.values())
        if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
            return None
        named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        return [p.name for p in parameters[1:] if p.kind in named]
