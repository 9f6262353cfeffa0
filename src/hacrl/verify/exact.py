"""`exact`: the reply is the reference answer, character for character."""

from dataclasses import dataclass
from typing import ClassVar

from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import right, unparsed, wrong


@dataclass(frozen=True)
class ExactVerifier:
    """Compares the whole reply with the reference answer. An empty reply is UNPARSED.

    Example: reply " 42\\n", reference "42" -> OK; reply "42." -> WRONG.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "exact"
    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    strip: bool = True
    """Ignore white space around reply and reference answer."""
    case: bool = True
    """Distinguish upper and lower case."""

    def judge(self, reply: str, problem: Problem) -> Verdict:
        answer = self._normal(reply)
        if not answer:
            return unparsed("empty reply")
        return right(answer) if answer == self._normal(problem.answer) else wrong(answer)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text if self.case else text.casefold()
