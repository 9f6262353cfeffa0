"""`choice`: multiple choice, the letters A to E.

The letter of a reply is found by the first rule that matches; within a rule the last match counts:
    1. \\boxed{B}, also \\boxed{\\text{(B)}} and \\boxed{B. Paris}
    2. "answer is B", "answer: (B)", "option B", "choice B"
    3. a line that is only a letter: "B", "(B)", "B.", "**B**"
    4. a letter in brackets: (B)
    5. the beginning of the reply: "B) Paris", "B. Paris"
    6. a capital letter that stands alone, but not "A" before a lower-case word (an article)
Lower-case letters count in rules 1 to 5, but not "a" before a lower-case word in rule 2 ("to answer a
question"). A reply without a letter is UNPARSED.
"""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from hacrl.types import Problem, Verdict
from hacrl.verify.extract import last_box
from hacrl.verify.number import last
from hacrl.verify.protocol import failed, right, unparsed, wrong

_WRAP = r"[\s*_(\[{$]*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?[\s*(]*"


@dataclass(frozen=True)
class ChoiceVerifier:
    """Compares the chosen letter with the reference letter ("B", "(B)" or "b").

    Example: reference "B"; "The answer is (B), not (C)." -> OK by rule 2; "(A) or rather (C)" -> WRONG.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "choice"
    version: ClassVar[str] = "2"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    letters: Annotated[str, Field(pattern="^[A-Z]+$")] = "ABCDE"
    """The letters to choose from, in upper case."""

    def judge(self, reply: str, problem: Problem) -> Verdict:
        letter = rf"([{re.escape(self.letters)}{re.escape(self.letters.lower())}])"
        reference = re.match(rf"{_WRAP}{letter}(?![A-Za-z])", problem.answer)
        if reference is None:
            return failed(f"the reference answer {problem.answer!r} is none of {self.letters}")
        chosen = self._find(reply, letter + "(?![A-Za-z'])")
        if chosen is None:
            return unparsed("no letter in the reply")
        return (right if chosen == reference[1].upper() else wrong)(chosen)

    def _find(self, reply: str, letter: str) -> str | None:
        found = re.match(_WRAP + letter, last_box(reply) or "")
        said = r"\b(?i:answer|option|choice)(?:\s+(?i:is)|\s*:|\s*=)?\s*:?"
        for pattern, flags in (
            (rf"{said}{_WRAP}(?!a\s+[a-z]){letter}", 0),
            (rf"^[\s*(\[]*{letter}[\s*)\].:]*$", re.MULTILINE),
            (rf"\(\s*{letter}\s*\)", 0),
            (rf"\A[\s*]*{letter}[*).:]+\s", 0),
            (rf"(?<![A-Za-z'\\])(?!A\s+[a-z])([{self.letters}])(?![A-Za-z'])", 0),
        ):
            found = found or last(re.finditer(pattern, reply, flags))
        return found[1].upper() if found else None
