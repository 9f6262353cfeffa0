"""`function`: a plain Python function of yours as the verifier.

    # rewards.py, in the folder you run from
    def score(completion, answer, **columns):
        return 1.0 if answer in completion else 0.0

    [verifier]
    kind = "function"
    options = { path = "rewards:score" }

It gets the reply as its first argument and, by name, `answer` and the other columns of the problem's
data row; without **columns only those it names. It returns a reward inside `reward_range`, or None
for "could not be judged" (ERROR: left out of credit and capability). The largest reward is OK, any
smaller one WRONG. It runs in the pool: it may hang or crash without harm to the run.
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
    """Import path "module:function"."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and largest reward the function may return; anything else is ERROR. hacpo needs a
    least reward of 0 or more."""
    version: str = "1"
    """Change it when the function changes, so that stored verdicts can be told apart."""

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if not low < high:
            raise UserError(f"verifier.options.reward_range = [{low}, {high}]: least must be first")

    @property
    def name(self) -> str:
        return f"function({self.path})"

    def prepare(self) -> None:
        """Imports the function before any clock runs; UserError if that fails."""
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
        """The columns it asks for by name; None if it takes all."""
        kinds = inspect.Parameter
        parameters = list(inspect.signature(self._function).parameters.values())
        if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
            return None
        named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        return [p.name for p in parameters[1:] if p.kind in named]
