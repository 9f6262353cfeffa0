"""`number`: the first or last number of the reply equals the reference answer.

A number is an optional sign, digits with or without thousands commas, decimals, an exponent, or a
fraction of two such numbers without spaces.

    1,234.50   -7   +3   .5   6.02e23   3/4   -1/2   $18   50%   5kg   x=-3   2-5 (two: 2 and 5)

Not numbers: digits right after a letter (x2, H2O), a fraction over zero. `1,23` is two numbers, 1 and
23. The minus sign U+2212 is a minus. Comparison is exact, in fractions, unless a tolerance is set.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from hacrl.safe_text import plural
from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import failed, right, unparsed, wrong

T = TypeVar("T")
# Possessive digits (++) keep the search linear in replies of a million digits.
_UNSIGNED = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)(?:\.[0-9]++)?(?:[eE][+\-]?[0-9]{1,3}(?![0-9]))?"
    r"|(?<![.0-9])\.[0-9]++"
)
_NUMBER = re.compile(
    # A sign after a digit, letter or closing bracket is an operation ("5-3"), not a sign.
    rf"(?<![A-Za-z_0-9])(?<![0-9]\.)(?:(?<![\w)\]}}])[+\-])?(?P<top>{_UNSIGNED})"
    rf"(?:/(?P<bottom>-?(?:{_UNSIGNED}))(?!/))?"
)
_LOOKS_LIKE_ONE = re.compile(
    r"[+\-]?[0-9]+(?:[ \u00a0\u202f_.,:^'\u2019-][0-9]+)+|[0-9]+ [0-9]+/[0-9]+"
    r"|[-\u2013]\s?\\?[$\u00a3\u20ac]?\s?[0-9](?:[0-9.,]*[0-9])?"
)
_TOO_LONG = 1000
"""Characters; exact arithmetic on longer numbers would be slow."""


def numbers_in(text: str) -> Iterator[Fraction]:
    """All numbers of a text, in order.

    Example: list(numbers_in("1,200 eggs at 3/4")) == [Fraction(1200), Fraction(3, 4)]
    """
    for match in _NUMBER.finditer(text.replace("\u2212", "-")):
        if len(match.group()) > _TOO_LONG:
            continue
        top, bottom = (Fraction((match[n] or "1").replace(",", "")) for n in ("top", "bottom"))
        if bottom:
            yield (-top if match.group().startswith("-") else top) / bottom


def last(items: Iterator[T]) -> T | None:
    """The last item of an iterator, or None."""
    tail = deque(items, maxlen=1)
    return tail[0] if tail else None


def number_texts(text: str) -> Iterator[str]:
    """All numbers of a text as written, with sign and commas."""
    return (match.group() for match in _NUMBER.finditer(text.replace("\u2212", "-")))


def misread(answers: Iterable[str]) -> str:
    """A note about reference answers that look like one number and are read as another; "" without
    any.

    Example: misread(["3,5", "1 000"]) names '3,5', which is read as 5.
    """
    whole = [answer.strip() for answer in answers if _LOOKS_LIKE_ONE.fullmatch(answer.strip())]
    wrong = [answer for answer in whole if list(number_texts(answer)) != [answer]]
    if not wrong:
        return ""
    return (
        f"the verifier `number` misreads {plural(len(wrong), 'reference answer')}: "
        f"{wrong[0]!r} as {last(number_texts(wrong[0]))}. Write numbers like 3.5, -1000 or 1,000"
    )


@dataclass(frozen=True)
class NumberVerifier:
    """Compares the first or last number of the reply with the last number of the reference answer.

    Example: reply "17 + 25 = 42.", reference "42" -> OK with which = "last", WRONG with "first".
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "number"
    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    which: Literal["first", "last"] = "last"
    """The number of the reply that is its answer."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Largest accepted difference as a fraction of the reference answer; 0 compares exactly."""

    def judge(self, reply: str, problem: Problem) -> Verdict:
        references = list(numbers_in(problem.answer))
        if not references:
            return failed(f"the reference answer {problem.answer!r} contains no number")
        numbers = numbers_in(reply)
        found = next(numbers, None) if self.which == "first" else last(numbers)
        if found is None:
            return unparsed("no number in the reply")
        reference = references[-1]
        near = abs(found - reference) <= Fraction(self.tolerance) * abs(reference)
        return right(str(found)) if near else wrong(str(found))
