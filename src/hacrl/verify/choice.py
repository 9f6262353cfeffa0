"""`choice`: multiple choice, the letters A to E.

The letter of a reply is found by the first rule that matches; within a rule the last match counts:
    1. \\boxed{B}, also \\boxed{\\text{(B)}} and \\boxed{B. Paris}
    2. "answer is B", "answer: (B)", "**Answer**: B"
    3. "option B", "choice B"
    4. a line that is only a letter: "B", "(B)", "B.", "**B**"
    5. a letter in brackets: (B)
    6. the beginning of the reply: "B) Paris", "B. Paris"
    7. a capital letter that stands alone, but not "A" before a lower-case word (an article)
Lower-case letters count in rules 1 to 6, but not "a" before a lower-case word in rules 2 and 3 ("to
answer a question"). A reply without a letter is UNPARSED.
"""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from hacrl.types import Problem, Verdict
from hacrl.verify.extract import last_box
from hacrl.verify.number import last
from hacrl.verify.protocol import failed, right, unparsed, wrong

# Possessive (*+): a search in a long run of white space would take minutes.
_WRAP = r"[\s*_(\[{$`“‘'\"]*+(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?[\s*(]*+"


@dataclass(frozen=True)
class ChoiceVerifier:
    """Compares the chosen letter with the reference letter ("B", "(B)" or "b").

    Example: reference "B"; "The answer is (B), not (C)." -> OK by rule 2; "(A) or rather (C)" -> WRONG.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "choice"
    version: ClassVar[str] = "3"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    letters: Annotated[str, Field(pattern="^[A-Z]+$")] = "ABCDE"
    """The letters to choose from, in upper case."""

    def judge(self, reply: str, problem: Problem) -> Verdict:
        letter = rf"([{re.escape(self.letters)}{re.escape(self.letters.lower())}])"
        reference = re.match(rf"{_WRAP}{letter}(?![A-Za-z])", problem.answer)
        if reference is None:
            return failed(f"the reference answer {problem.answer!r} is none of {self.letters}")
        chosen = self._find(reply, letter + "(?!'?[A-Za-z])")
        if chosen is None:
            return unparsed("no letter in the reply")
        return (right if chosen == reference[1].upper() else wrong)(chosen)

    def _find(self, reply: str, letter: str) -> str | None:
        found = re.match(_WRAP + letter, last_box(reply) or "")
        said = rf"(?:\s+(?i:is)|\**\s*:|\s*=)?\s*+:?{_WRAP}(?!a\s+[a-z]){letter}"
        for pattern, flags in (
            (rf"\b(?i:answer){said}", 0),
            (rf"\b(?i:option|choice){said}", 0),
            (rf"^[\s*(\[]*{letter}[\s*)\].:]*$", re.MULTILINE),
            (rf"\(\s*{letter}\s*\)", 0),
            (rf"\A[\s*]*{letter}[*).:]+\s", 0),
            (rf"(?<![A-Za-z'\\])(?!A\s+[a-z])([{self.letters}])(?![A-Za-z'])", 0),
        ):
            found = found or last(re.finditer(pattern, reply, flags))
        return found[1].upper() if found else None
