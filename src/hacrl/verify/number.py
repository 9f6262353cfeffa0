"""`number`: the first or last number of the reply equals the gold's.

What counts as a number: an optional sign, digits with or without thousands commas, decimals, an
exponent, and a fraction of two such numbers written without spaces.

    1,234.50   -7   +3   .5   6.02e23   3/4   -1/2   $18   50%   5kg   x=-3   2-5 (two: 2 and 5)

Not numbers: digits glued to a letter before them (x2, H2O), a fraction over zero. `1,23` is two
numbers, 1 and 23. The minus sign of typography (U+2212) is a minus. All comparison is exact, in
fractions, unless a tolerance is set.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from hacrl.types import Problem, Verdict
from hacrl.verify.matching import last_match
from hacrl.verify.protocol import failed, right, unparsed, wrong

# Possessive digits (++) keep the search linear in hostile replies of a million digits.
_UNSIGNED = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)(?:\.[0-9]++)?(?:[eE][+\-]?[0-9]{1,3}(?![0-9]))?"
    r"|(?<![.0-9])\.[0-9]++"
)
_NUMBER = re.compile(
    # A sign after a digit, letter or closing bracket is an operation ("5-3"), not a sign.
    rf"(?<![A-Za-z_0-9])(?<![0-9]\.)(?:(?<![\w)\]}}])[+\-])?(?P<top>{_UNSIGNED})"
    rf"(?:/(?P<bottom>-?(?:{_UNSIGNED}))(?!/))?"
)
_TOO_LONG = 1000
"""Characters; no sensible answer is longer, and exact arithmetic on it would be slow."""


def numbers_in(text: str) -> Iterator[Fraction]:
    """All numbers of a text in order.

    Example: list(numbers_in("1,200 eggs at 3/4")) == [Fraction(1200), Fraction(3, 4)]
    """
    for match in _NUMBER.finditer(text.replace("\u2212", "-")):
        if len(match.group()) > _TOO_LONG:
            continue
        value = _value(match.group("top"))
        bottom = match.group("bottom")
        if bottom is not None:
            if not (divisor := _value(bottom)):
                continue
            value /= divisor
        yield -value if match.group().startswith("-") else value


def last_number_text(text: str) -> str | None:
    """The last number as written, sign and commas and all."""
    found = last_match(_NUMBER, text.replace("\u2212", "-"))
    return found.group() if found else None


def first_number_text(text: str) -> str | None:
    """The first number as written."""
    found = _NUMBER.search(text.replace("\u2212", "-"))
    return found.group() if found else None


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


@dataclass(frozen=True)
class NumberVerifier:
    """The first or last number of the reply against the (last) number of the gold.

    Example: reply "17 + 25 = 42.", gold "42" -> OK with which = "last", WRONG with "first".
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "number"
    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    which: Literal["first", "last"] = "last"
    """Which number of the reply is its answer."""
    tolerance: float = 0.0
    """Largest accepted difference as a share of the gold; 0 compares exactly."""
    after: str = ""
    """Read only what follows the first place of these words, e.g. "The answer is": with which =
    "first", a model that does not know where to stop is judged by the answer it gave. A reply
    without them is UNPARSED."""

    def judge(self, reply: str, problem: Problem) -> Verdict:
        golds = list(numbers_in(problem.answer))
        if not golds:
            return failed(f"the gold answer {problem.answer!r} holds no number")
        _, words, rest = reply.partition(self.after) if self.after else ("", "", reply)
        if self.after and not words:
            return unparsed(f"no {self.after!r} in the reply")
        found = self._chosen(rest)
        if found is None:
            return unparsed(f"no number after {words!r}" if words else "no number in the reply")
        gold = golds[-1]
        near = abs(found - gold) <= Fraction(self.tolerance) * abs(gold)
        return right(str(found)) if near else wrong(str(found))

    def _chosen(self, text: str) -> Fraction | None:
        if self.which == "first":
            return next(numbers_in(text), None)
        tail = deque(numbers_in(text), maxlen=1)
        return tail[0] if tail else None
