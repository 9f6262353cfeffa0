"""Rank the arms of configs/suites/open-development.toml and print the rule that its criterion chooses.

    python scripts/choose_rule.py    # from docs/results/open-development.jsonl

The criterion was written before the suite was run. Accuracy is the mean over the evaluations after the
start.

1. Gap of an arm for an agent of a team: its mean accuracy minus the larger of naive's and overlap's.
   Score of an arm: the mean gap over all agents of all teams; worst: its smallest gap.
2. Of open and right take the one whose three arms have the larger mean score; of level, level-first and
   wins the one whose two arms have. Together they name one arm.
3. That arm, overlap-open, overlap-first and hacpo-open are the finalists. The largest score wins; within
   0.5 points of it, the largest worst gap.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean

from hacrl.study.compare import compare

ROOT = Path(__file__).resolve().parents[1]
SUCCESSES, OTHERS = ("open", "right"), ("level", "level-first", "wins")
FINALISTS = "overlap-open", "overlap-first", "hacpo-open"
TIE = 0.5  # points


def accuracies(suite: str, kept: Path) -> dict[str, dict[str, float]]:
    """Percent by arm and "team / agent": means over the seeds and the evaluations after the start."""
    with tempfile.TemporaryDirectory() as folder:
        path = ROOT / "configs" / "suites" / f"{suite}.toml"
        rows = compare(path, Path(folder), report_only=True, kept=kept).rows
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        found[row.arm][row.name] = 100 * mean(band.mean for band in row.curve if band.step)
    return found


def gaps(after: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each arm minus the better of naive and overlap, for every agent that all arms have."""
    agents = set.intersection(*(set(a) for a in after.values()))
    best = {a: max(after["naive"][a], after["overlap"][a]) for a in agents}
    return {arm: {a: found[a] - best[a] for a in sorted(agents)} for arm, found in after.items()}


def choose(gap: dict[str, dict[str, float]]) -> tuple[str, dict[str, float]]:
    """The chosen arm, and the mean score of the arms of every setting."""
    score = {arm: mean(g.values()) for arm, g in gap.items()}
    settings = {s: mean(score[f"{s}-{o}"] for o in OTHERS) for s in SUCCESSES}
    settings |= {o: mean(score[f"{s}-{o}"] for s in SUCCESSES) for o in OTHERS}
    combined = "-".join(max(names, key=lambda n: settings[n]) for names in (SUCCESSES, OTHERS))
    finalists = (combined, *FINALISTS)
    top = max(score[a] for a in finalists)
    close = [a for a in finalists if score[a] >= top - TIE]
    return max(close, key=lambda a: min(gap[a].values())), settings


def main() -> None:
    suite = "open-development"
    gap = gaps(accuracies(suite, ROOT / "docs" / "results" / f"{suite}.jsonl"))
    names = ("arm", "score", "worst", *next(iter(gap.values())))
    print("|", " | ".join(names), "|")
    print("|---" + "|---:" * (len(names) - 1) + "|")
    for arm, found in sorted(gap.items(), key=lambda item: -mean(item[1].values())):
        cells = (mean(found.values()), min(found.values()), *found.values())
        print(f"| {arm} |", " | ".join(f"{c:+.1f}" for c in cells), "|")
    chosen, settings = choose(gap)
    print("settings:", ", ".join(f"{name} {score:+.2f}" for name, score in settings.items()))
    print("chosen:", chosen)


if __name__ == "__main__":
    main()
