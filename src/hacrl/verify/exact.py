"""`exact`: the reply is the reference answer, character for character."""

from dataclasses import dataclass
from typing import ClassVar

from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import right, unparsed, wrong


@dataclass(frozen=True)
class ExactVerifier:
    """Compares the whole reply with the reference answer, without white space around them. An empty
    reply is UNPARSED.

    Example: reply " 42\\n", reference "42" -> OK; reply "42." -> WRONG.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: ClassVar[str] = "exact"
    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def judge(self, reply: str, problem: Problem) -> Verdict:
        answer = reply.strip()
        if not answer:
            return unparsed("empty reply")
        return right(answer) if answer == problem.answer.strip() else wrong(answer)
