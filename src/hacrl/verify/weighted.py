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
from dataclasses import replace

from hacrl.types import Problem, Verdict
from hacrl.verify.protocol import DETAIL_LIMIT, Verifier, guarded_judge


class SumVerifier:
    """The weighted sum of the rewards of all parts, (name, weight, verifier). The first part decides
    whether a reply is right and which answer it has. A reply that one part cannot judge is not judged.

    Example: SumVerifier([("math", 1.0, MathVerifier()), ("brief", 0.2, brief)])
    """

    def __init__(self, parts: Sequence[tuple[str, float, Verifier]]) -> None:
        self.parts = tuple(parts)
        self.name = "sum(" + "+".join(f"{w:g}*{verifier.name}" for _, w, verifier in parts) + ")"
        self.version = ",".join(str(verifier.version) for _, _, verifier in parts)

    @property
    def reward_range(self) -> tuple[float, float]:
        """The sums of the parts' smallest and largest rewards; a negative weight exchanges the two."""
        ends = [[weight * end for end in v.reward_range] for _, weight, v in self.parts]
        return sum(map(min, ends)), sum(map(max, ends))

    def prepare(self) -> None:
        for _, _, verifier in self.parts:
            if prepare := getattr(verifier, "prepare", None):
                prepare()

    def judge(self, reply: str, problem: Problem) -> Verdict:
        verdicts, products, rewards = [], [], []
        for name, weight, verifier in self.parts:
            verdict = guarded_judge(verifier, reply, problem, raise_memory=True)
            if not verdict.judged:
                return replace(verdict, detail=f"{name}: {verdict.detail}"[:DETAIL_LIMIT])
            verdicts.append(verdict)
            products.append(weight * verdict.reward)
            rewards.append((name, verdict.reward))
        return replace(verdicts[0], reward=sum(products), parts=tuple(rewards))
