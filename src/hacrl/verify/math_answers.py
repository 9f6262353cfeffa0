"""`math`: the final answer of the reply equals the reference answer, in whatever notation.

    1. the answer is found in the reply (extract.py); both answers are put into one spelling (latex.py)
    2. equal text is equal; plain numbers are compared exactly; words without regard to case
    3. lists and sets are compared in any order; tuples, intervals and matrices part by part
    4. the rest is algebra (symbolic.py, math-verify)

Units, currency and degree signs are ignored, and so are a leading "x =" and a missing base. Numbers are
exact: 0.33 is not 1/3, but a decimal of six or more digits equals the number it is the beginning of.
`tolerance` accepts rounded results. An unreadable reference answer is ERROR for every reply.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field

from hacrl.types import Problem, Verdict
from hacrl.verify import latex
from hacrl.verify.extract import final_answer
from hacrl.verify.number import number_texts
from hacrl.verify.protocol import failed, right, unparsed, wrong

_ENOUGH_DIGITS = 6
_LONGEST = 2000
"""Characters; algebra on longer answers, such as a sentence in a loop, takes longer than a call may."""
_OPERATION = re.compile(r"[-+!|/*^=<>]")


@dataclass(frozen=True)
class MathVerifier:
    """Judges LaTeX answers by value.

    Example: reference "\\\\frac{3}{4}"; replies "... \\\\boxed{0.75}" and "The answer is 6/8." -> OK
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "math"
    version: ClassVar[str] = "2"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    box_only: bool = False
    """Only a \\boxed{} is an answer; a reply without one is UNPARSED."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Largest accepted difference of two numbers as a fraction of the reference answer, e.g. 0.01 for
    rounded results in physics; 0 compares exactly."""

    def prepare(self) -> None:
        from hacrl.verify import symbolic

        symbolic.warm_up()

    def judge(self, reply: str, problem: Problem) -> Verdict:
        reference = latex.clean(problem.answer)
        if not _judgeable(reference):
            return failed(f"the reference answer {problem.answer!r} cannot be read")
        found = final_answer(reply, self.box_only)
        if found is None:
            return unparsed("no answer in the reply")
        answer = latex.clean(found)
        if not answer:
            return unparsed("the answer is empty")
        if not latex.words(reference) and _squeeze(reference) != _squeeze(answer):
            answer = _number_of_sentence(answer)
        if len(answer) > _LONGEST + 2 * len(reference):
            return wrong(found)
        return right(found) if self.same(reference, answer) else wrong(found)

    def same(self, reference: str, answer: str) -> bool:
        """Whether two cleaned answers mean the same."""
        if _squeeze(reference) == _squeeze(answer):
            return True
        words = latex.words(reference)
        if words:  # a letter may be a variable: x is not -x
            operation = len(words) == 1 and _OPERATION.search(answer)
            return words == latex.bare_words(answer) and not operation
        if (verdict := self._same_numbers(reference, answer)) is not None:
            return verdict
        if (time := latex.clock(reference)) is not None:
            return time == latex.clock(answer)
        if "=" in reference or "=" in answer or r"\in " in answer:
            return self._same_equations(reference, answer)
        return self._same_shapes(reference, answer)

    def _same_numbers(self, reference: str, answer: str) -> bool | None:
        """None if one of them is not a plain number."""
        g = latex.value(reference)
        a = latex.value(answer) or (latex.value(latex.without_letter_unit(answer)) if g else None)
        if (g is None) != (a is None):  # sqrt(2) and 1.41421356
            g, a = g or _evaluated(reference), a or _evaluated(answer)
            if g and a and (_begins(g, a) or _begins(a, g) or self._near(g.number, a.number)):
                return True
            return None
        if g is None or a is None:
            return None
        if g.percent == a.percent:
            return _begins(g, a) or _begins(a, g) or self._near(g.number, a.number)
        # 8 and 8 % (a question that asks for percent), or 0.08 and 8 %
        return self._near(g.number, a.number) or self._near(_scaled(g), _scaled(a))

    def _near(self, reference: Fraction, answer: Fraction) -> bool:
        return abs(reference - answer) <= Fraction(self.tolerance) * abs(reference)

    def _same_equations(self, reference: str, answer: str) -> bool:
        """ "x = 5" equals 5, but not "y = 5"; other equations may be rearranged."""
        parts = [latex.split(text) for text in (reference, answer)]
        if len(parts[0]) > 1 or len(parts[1]) > 1:
            if len(parts[0]) == len(parts[1]):
                return self._same_bag(*parts)
            label, rest = latex.unlabel(answer)
            return bool(label) and self.same(reference, rest)  # x = 1, 2
        (wanted, right_side), (label, rest) = latex.unlabel(reference), latex.unlabel(answer)
        if (wanted or label) and (not wanted or not label or wanted == label):
            if ("=" in right_side) == ("=" in rest):
                return self.same(right_side, rest)
        elif wanted and label:
            return False
        sides = answer.split("=")
        if len(sides) > 1 and "=" not in reference and all(self.same(reference, s) for s in sides):
            return True  # 1/2 = 0.5
        return self._same_algebra(reference, answer)

    def _same_shapes(self, reference: str, answer: str) -> bool:
        g, a = latex.shape(reference), latex.shape(answer)
        kinds = (g.kind, a.kind)
        if kinds in (("list", "list"), ("union", "union")):
            return self._same_bag(g.parts, a.parts)
        if kinds == ("base", "base"):
            return g.parts == a.parts
        if g.kind == "base":
            return g.parts[0] == _squeeze(answer).upper()
        if kinds == ("matrix", "matrix") or kinds == ("tuple", "tuple"):
            return g.brackets == a.brackets and self._same_rows(g.parts, a.parts)
        if set(kinds) == {"tuple", "list"} or set(kinds) == {"tuple", "matrix"}:
            flat = {"()", ""} | {f"{len(g.parts)}x1", f"1x{len(g.parts)}"}
            return {g.brackets, a.brackets} <= flat and self._same_rows(g.parts, a.parts)
        if kinds == ("one", "list"):  # "1/2 or 0.5"
            return all(self.same(reference, part) for part in a.parts)
        if "list" in kinds or "matrix" in kinds:
            return False
        return self._same_algebra(reference, answer)

    def _same_rows(self, reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        return len(reference) == len(answer) and all(map(self.same, reference, answer))

    def _same_bag(self, reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Whether the parts are equal in some order."""
        if len(reference) != len(answer):
            return False
        left = list(answer)
        for part in reference:
            partner = next((other for other in left if self.same(part, other)), None)
            if partner is None:
                return False
            left.remove(partner)
        return True

    def _same_algebra(self, reference: str, answer: str) -> bool:
        from hacrl.verify import symbolic

        return symbolic.equal(reference, answer)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _evaluated(text: str) -> latex.Value | None:
    """The value of a formula without variables, to 30 digits; None if it has no real value."""
    from hacrl.verify import symbolic

    number = symbolic.number(text)
    return latex.Value(number) if number is not None else None


def _scaled(value: latex.Value) -> Fraction:
    return value.number / 100 if value.percent else value.number


def _begins(exact: latex.Value, decimal: latex.Value) -> bool:
    """Whether a decimal of enough digits is the exact value, rounded or truncated."""
    if exact.decimals is not None or decimal.decimals is None or decimal.digits < _ENOUGH_DIGITS:
        return False
    if exact.number * decimal.number <= 0:
        return False
    unit = Fraction(10) ** -decimal.decimals
    return -unit / 2 <= abs(exact.number) - abs(decimal.number) < unit


def _number_of_sentence(answer: str) -> str:
    """The number of "18 eggs that she sells" and of "\\text{5 cm}"; other answers unchanged."""
    if whole := re.fullmatch(r"\\text\{([^{}]*)\}", answer):
        answer = latex.clean(whole[1])
    plain = re.sub(r"\\[A-Za-z]+(?:\s*\{[A-Za-z ]*\})?", " ", answer)
    if latex.value(answer) is None and re.search(r"[A-Za-z]{3}", plain):
        return next(number_texts(answer), answer)
    return answer


@lru_cache(maxsize=4096)
def _judgeable(reference: str) -> bool:
    """Whether a reference answer can be read."""
    from hacrl.verify import symbolic

    if not reference:
        return False
    if latex.words(reference) or latex.value(reference) is not None:
        return True
    rest = latex.unlabel(reference)[1]
    found = latex.shape(rest)
    if found.kind == "base":
        return True
    if found.kind != "one":
        return all(_judgeable(part) for part in found.parts)
    return (rest != reference and _judgeable(rest)) or symbolic.readable(rest)
