"""`math`: the final answer of the reply equals the reference answer, in whatever notation.

    1. the answer is found in the reply (extract.py); both answers are put into one spelling (latex.py)
    2. equal text is equal; plain numbers are compared exactly; words without regard to case
    3. lists and sets are compared in any order; tuples, intervals and matrices part by part
    4. the rest is algebra (symbolic.py, math-verify)

Units, currency and degree signs are ignored, and so are a leading "x =" and a missing base. Numbers are
exact: 0.33 is not 1/3. An unreadable reference answer is ERROR for every reply.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from hacrl.types import Problem, Verdict
from hacrl.verify import latex
from hacrl.verify.extract import final_answer
from hacrl.verify.number import number_texts
from hacrl.verify.protocol import failed, right, unparsed, wrong

_LABEL = re.compile(r"\s*\\?[A-Za-z]+\s*=\s*(?=[^=]+$)")


@dataclass(frozen=True)
class MathVerifier:
    """Judges LaTeX answers by value.

    Example: reference "\\\\frac{3}{4}"; replies "... \\\\boxed{0.75}" and "The answer is 6/8." -> OK
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "math"
    version: ClassVar[str] = "2"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def prepare(self) -> None:
        from hacrl.verify import symbolic

        symbolic.warm_up()

    def judge(self, reply: str, problem: Problem) -> Verdict:
        reference = latex.clean(problem.answer)
        if not _judgeable(reference):
            return failed(f"the reference answer {problem.answer!r} cannot be read")
        found = final_answer(reply)
        if found is None:
            return unparsed("no answer in the reply")
        answer = latex.clean(found)
        if not answer:
            return unparsed("the answer is empty")
        if not latex.words(reference) and _squeeze(reference) != _squeeze(answer):
            answer = _number_of_sentence(answer)
        return right(found) if same(reference, answer) else wrong(found)


def same(reference: str, answer: str) -> bool:
    """Whether two cleaned answers mean the same."""
    if "=" not in reference:
        answer = _LABEL.sub("", answer)  # x = 5
    if _squeeze(reference) == _squeeze(answer):
        return True
    if words := latex.words(reference):
        return words == latex.bare_words(answer)
    if re.fullmatch(r"\d{1,2}:\d\d", reference):  # a time of day is not a ratio
        return answer.startswith(reference)
    r, a = latex.value(reference), latex.value(answer)
    if r is not None and a is not None:
        if r.number == a.number:
            return a.percent or not r.percent  # 8 and 8 %: the question asks for percent
        return r.number / (100 if r.percent else 1) == a.number / (100 if a.percent else 1)
    return _same_shapes(reference, answer)


def _same_shapes(reference: str, answer: str) -> bool:
    from hacrl.verify import symbolic

    r, a = latex.shape(reference), latex.shape(answer)
    kinds = {r.kind, a.kind}
    if r.kind == "base":
        return r.parts == a.parts if a.kind == "base" else r.parts[0] == _squeeze(answer).upper()
    if kinds == {"list"}:
        return _same_bag(r.parts, a.parts)
    if kinds == {"matrix"} or kinds == {"tuple"}:
        return r.brackets == a.brackets and _same_rows(r.parts, a.parts)
    if kinds == {"tuple", "list"} or kinds == {"tuple", "matrix"}:
        flat = {"()", "", f"{len(r.parts)}x1", f"1x{len(r.parts)}"}
        return {r.brackets, a.brackets} <= flat and _same_rows(r.parts, a.parts)
    if kinds & {"list", "matrix"}:
        return False
    return symbolic.equal(reference, answer)


def _same_rows(reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    return len(reference) == len(answer) and all(map(same, reference, answer))


def _same_bag(reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Whether the parts are equal in some order."""
    left = list(answer)
    for part in reference:
        partner = next((other for other in left if same(part, other)), None)
        if partner is None:
            return False
        left.remove(partner)
    return not left


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _number_of_sentence(answer: str) -> str:
    """The number of "18 eggs that she sells"; other answers unchanged."""
    plain = re.sub(r"\\[A-Za-z]+(?:\s*\{[A-Za-z ]*\})?", " ", answer)
    if latex.value(answer) is None and re.search(r"[A-Za-z]{3}", plain):
        return next(number_texts(answer), answer)
    return answer


@lru_cache(maxsize=4096)
def _judgeable(reference: str) -> bool:
    """Whether a reference answer can be read."""
    from hacrl.verify import symbolic

    if latex.words(reference) or latex.value(reference) is not None:
        return True
    found = latex.shape(reference)
    if found.kind in ("one", "base"):
        return found.kind == "base" or (bool(reference) and symbolic.readable(reference))
    return all(map(_judgeable, found.parts))
