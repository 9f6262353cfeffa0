"""How much of an accuracy is luck: the same replies judged by the answers of other problems.

    python benchmarks/luck.py runs/compare/real-gsm8k/runs/team/*/seed-*

For each run, agent and evaluation: the share of replies that are right, and the mean share if every
problem had another problem's answer. A model that has learned only which numbers are frequent answers
raises both alike. For verifiers that read a number (`number`): what was read is kept with each reply.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from hacrl.verify.number import numbers_in

REPLIES = "evaluation/step-*/*/replies.jsonl"


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Right replies, and those that luck makes right.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    runs = parser.parse_args().runs
    found = [(run, file) for run in runs for file in sorted(run.glob(REPLIES))]
    if not found:
        parser.error(f"no replies of evaluations ({REPLIES}) under {', '.join(map(str, runs))}")
    print(f"{'right':>6} {'luck':>6}")
    for run, file in found:
        if replies := [json.loads(line) for line in file.read_text().splitlines()]:
            told = " ".join(f"{100 * share:6.2f}" for share in luck(replies))
            print(f"{told}  {file.parent.relative_to(run.parent.parent)}")


if __name__ == "__main__":
    main()
