"""Measure how much of an accuracy is luck: judge the same replies by the answers of other problems.

    python benchmarks/luck.py runs/compare/real-gsm8k/runs/team/*/seed-*

For each run, agent and evaluation it prints the percentage of right replies, and the mean percentage
if every problem had another problem's answer. A model that has learned only which numbers are frequent
answers raises both. For the verifier `number`, which stores the number it read with each reply.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from hacrl.store.reader import read_replies
from hacrl.verify.number import numbers_in

REPLIES = "evaluation/step-*/*/replies.jsonl"


def luck(replies: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Fraction of replies that are right, and that are right by luck.

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
        if replies := read_replies(file.parent, "Repeat the evaluation"):
            figures = " ".join(f"{100 * fraction:6.2f}" for fraction in luck(replies))
            print(f"{figures}  {file.parent.relative_to(run.parent.parent)}")


if __name__ == "__main__":
    main()
