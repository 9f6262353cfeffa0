"""How much of an accuracy is luck: the same replies judged by the answers of other problems.

    python benchmarks/luck.py runs/compare/real-gsm8k/cells/team/*/seed-*

For each run, agent and evaluation: the share of replies that are right, and the mean share if every
problem had another problem's answer. A model that has learned only which numbers are frequent answers
raises both alike. For verifiers that read a number (`number`): what was read is kept with each reply.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from hacrl.verify.number import numbers_in


def luck(replies: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Share of replies that are right, and that luck makes right.

    Example: two problems with answers 1 and 2, replies 1 and 1: (0.5, 0.5)
    """
    answers = {r["problem"]: _last_number(r["answer"]) for r in replies}
    frequent = Counter(answers.values())
    right = lucky = 0
    for reply in replies:
        read = _last_number(reply["detail"] or "")
        if read is None:
            continue
        hit = read == answers[reply["problem"]]
        right += hit
        lucky += frequent[read] - hit
    return right / len(replies), lucky / len(replies) / max(1, len(answers) - 1)


def _last_number(text: str) -> Fraction | None:
    """As the verifier reads an answer."""
    found = list(numbers_in(text))
    return found[-1] if found else None


def main(runs: Sequence[str]) -> None:
    print(f"{'right':>6} {'luck':>6}")
    for run in runs:
        for file in sorted(Path(run).glob("evaluation/step-*/*/replies.jsonl")):
            replies = [json.loads(line) for line in file.read_text().splitlines()]
            if not replies:
                continue
            found = luck(replies)
            told = " ".join(f"{100 * share:6.2f}" for share in found)
            print(f"{told}  {file.parent.relative_to(Path(run).parent.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
