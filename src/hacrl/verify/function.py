"""`function`: a Python function of yours as the verifier.

    # rewards.py, in the folder of the config file
    def score(completion, answer, **columns):
        return 1.0 if answer in completion else 0.0

    [verifier]
    kind = "function"
    options = { path = "rewards:score" }

The function gets the reply as its first argument and, by name, `answer` and all columns of the problem's
data row; without **columns only those it names. It returns a reward inside `reward_range`, or
None for "could not be judged" (ERROR: left out of credit and capability). The largest reward is OK, any
smaller one WRONG. The function runs in a worker process: it may hang or crash without harm to the run.

Reward functions written for TRL work unchanged: a function with a parameter `completions` is called by
name with lists of one, `completions=[reply], prompts=[question], answer=[answer], ...`, and returns a
list of one reward. Replies and prompts are plain text, as TRL passes them for datasets without messages.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, ClassVar

from hacrl.errors import UserError
from hacrl.importing import given_function, import_object
from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import failed, right, wrong


@dataclass(frozen=True)
class FunctionVerifier:
    """Calls f(completion, **columns) -> float | None.

    Example: FunctionVerifier(path="rewards:score", reward_range=(0.0, 2.0))
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    path: str
    """Import path "module:function". A module in the folder of the config file needs no path."""
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
        columns = {**problem.asked, **problem.columns, "answer": problem.answer}
        is_trl = "completions" in self._parameters
        if is_trl:
            question = problem.messages[-1].content if problem.messages else ""
            columns |= {"prompts": question, "completions": reply}
        first = next(iter(self._parameters), "")
        lacking = [
            name
            for name, p in self._parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
            if name not in columns and (is_trl or name != first)
        ]
        if lacking:
            return failed(
                f"the function needs {', '.join(map(repr, lacking))}, which is no column of the row; "
                f"the columns are: {', '.join(sorted(columns))}"
            )
        if not any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            columns = {name: columns[name] for name in self._parameters if name in columns}
        if not is_trl:
            columns.pop(first, None)
            return self._verdict(self._function(reply, **columns))
        try:
            rewards = self._function(**{name: [value] for name, value in columns.items()})
        except TypeError as error:
            raise TypeError(f"{error} (completions and prompts are lists of plain text)") from error
        if not hasattr(rewards, "__len__") or len(rewards) != 1 or isinstance(rewards, str):
            return failed(f"the function returned {rewards!r:.80}, not a list of one reward")
        return self._verdict(rewards[0])

    def _verdict(self, reward: Any) -> Verdict:
        if reward is None:
            return failed("the function returned None: not judged (is a `return` missing?)")
        try:
            if isinstance(reward, (str, bytes)):
                raise TypeError
            value = float(reward)
        except (TypeError, ValueError):
            return failed(f"the function returned {reward!r:.80}, not a number")
        low, high = self.reward_range
        if low <= value <= high:
            return (right if value >= high else wrong)(f"{value:g}", value)
        way_out = "set it to the smallest and the largest reward of your function"
        if not isfinite(value):
            way_out = "return a finite number, or None for a reply that cannot be judged"
        elif -1 <= value < 0:
            way_out += ", or return (r + 1) / 2, which is in [0, 1]"
        return failed(
            f"reward {value:g} is outside verifier.options.reward_range = [{low:g}, {high:g}]: "
            f"{way_out}"
        )

    @cached_property
    def _function(self) -> Callable[..., Any]:
        given = given_function(self.path, self.version)
        return given or import_object(self.path, "verifier.options.path")

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self._function).parameters)
