"""`sum`: several rewards with weights, as `reward_funcs` and `reward_weights` of TRL.

[verifier]
kind = "sum"

[[verifier.rewards]]
kind = "math"

[[verifier.rewards]]
kind = "function"
options = { path = "rewards:brief" }
weight = 0.2
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import DETAIL_LIMIT, Verifier, guarded_judge


@dataclass(frozen=True)
class Part:
    """One reward of a sum.

    Example: Part("brief", 0.2, FunctionVerifier(path="rewards:brief"))
    """

    name: str
    weight: float
    verifier: Verifier


class SumVerifier:
    """The weighted sum of the rewards of all parts. The first part decides whether a reply is right
    and which answer it has. A reply that one part cannot judge is not judged.

    Example: SumVerifier([Part("math", 1.0, MathVerifier()), Part("brief", 0.2, brief)])
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.name = "sum(" + "+".join(f"{p.weight:g}*{p.verifier.name}" for p in parts) + ")"
        self.version = ",".join(str(p.verifier.version) for p in parts)

    @property
    def reward_range(self) -> tuple[float, float]:
        """The sums of the parts' smallest and largest rewards; a negative weight exchanges the two."""
        ends = [[p.weight * end for end in p.verifier.reward_range] for p in self.parts]
        return sum(map(min, ends)), sum(map(max, ends))

    def prepare(self) -> None:
        for part in self.parts:
            if prepare := getattr(part.verifier, "prepare", None):
                prepare()

    def judge(self, reply: str, problem: Problem) -> Verdict:
        verdicts = []
        for part in self.parts:
            verdict = guarded_judge(part.verifier, reply, problem, raise_memory=True)
            if not verdict.judged:
                return replace(verdict, detail=f"{part.name}: {verdict.detail}"[:DETAIL_LIMIT])
            verdicts.append(verdict)
        both = list(zip(self.parts, verdicts, strict=True))
        return replace(
            verdicts[0],
            reward=sum(part.weight * verdict.reward for part, verdict in both),
            parts=tuple((part.name, verdict.reward) for part, verdict in both),
        )
