"""`choice`: multiple choice, the letters A to E.

Where a reply states its letter, in this order; within a rule the last one counts:
    1. \\boxed{B}, also \\boxed{\\text{(B)}} and \\boxed{B. Paris}
    2. "answer is B", "answer: (B)", "option B", "choice B"
    3. a line that is only a letter: "B", "(B)", "B.", "**B**"
    4. a letter in brackets: (B)
    5. the very beginning of the reply: "B) Paris", "B. Paris"
    6. a capital letter standing alone, but "A" not before a small word (it is an article there)
Small letters count in rules 1 to 5. A reply in which no rule finds a letter is UNPARSED.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from hacrl.types import Problem, Verdict
from hacrl.verify.extract import last_box
from hacrl.verify.matching import last_match
from hacrl.verify.protocol import failed, right, unparsed, wrong

_WRAP = r"[\s*_(\[{$]*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?[\s*(]*"


@dataclass(frozen=True)
class ChoiceVerifier:
    """The chosen letter against the gold letter ("B", "(B)" or "b").

    Example: gold "B"; "The answer is (B), not (C)." -> OK by rule 2; "(A) or rather (C)" -> WRONG.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "choice"
    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    letters: str = "ABCDE"
    """The letters to choose from, in capitals."""

    def judge(self, reply: str, problem: Problem) -> Verdict:
        gold = _first(rf"{_WRAP}([{self._class}])(?![A-Za-z])", problem.answer)
        if gold is None:
            return failed(f"the gold answer {problem.answer!r} is none of {self.letters}")
        chosen = self.chosen(reply)
        if chosen is None:
            return unparsed("no letter in the reply")
        return right(chosen) if chosen == gold else wrong(chosen)

    def chosen(self, reply: str) -> str | None:
        """The letter a reply states, or None."""
        letter = rf"([{self._class}])(?![A-Za-z'])"
        box = last_box(reply)
        if box is not None and (found := _first(rf"{_WRAP}{letter}", box)):
            return found
        for pattern, flags in (
            (rf"\b(?:answer|option|choice)(?:\s+is|\s*:|\s*=)?\s*:?{_WRAP}{letter}", re.IGNORECASE),
            (rf"^[\s*(\[]*{letter}[\s*)\].:]*$", re.MULTILINE),
            (rf"\(\s*{letter}\s*\)", 0),
            (rf"\A[\s*]*{letter}[*).:]+\s", 0),
            (rf"(?<![A-Za-z'\\])(?!A\s+[a-z])([{self.letters}])(?![A-Za-z'])", 0),
        ):
            last = last_match(re.compile(pattern, flags), reply)
            if last is not None:
                return last.group(1).upper()
        return None

    @property
    def _class(self) -> str:
        return re.escape(self.letters) + re.escape(self.letters.lower())


def _first(pattern: str, text: str) -> str | None:
    match = re.match(pattern, text)
    return match.group(1).upper() if match else None
