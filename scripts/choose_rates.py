"""Choose learning rates of the pretrained pair, and hacpo's floor, from the runs of real-rates.toml.

    python scripts/choose_rates.py            # the table, and what real-pair.toml contains
    python scripts/choose_rates.py --first    # arms of the first round, for --only
    python scripts/choose_rates.py --next     # arms of the second round

Arms are called RULE-rate-RATE. The first round has two rates and the floors, the second one more rate
for each rule: the higher one if its mean accuracy over both agents was higher at the higher rate. For
every rule and agent the rate with the largest mean held-out accuracy over the development seeds is
chosen, and of the floors the one with the largest mean over both agents.
"""

import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import mean

from choose_rule import accuracies

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "configs" / "suites" / "real-rates.toml"
KEPT = ROOT / "docs" / "results" / "real-rates.jsonl"
LOW, HIGH = "5e-6", "1e-5"  # rates of the first round
LOWER, HIGHER = "2.5e-6", "2e-5"

Found = dict[str, dict[str, dict[str, float]]]  # rule -> agent -> rate -> percent after training


def read() -> Found:
    """Held-out accuracies of the kept runs."""
    found: Found = defaultdict(lambda: defaultdict(dict))
    for arm, after in accuracies(KEPT, SUITE).items():
        rule, _, rate = arm.partition("-rate-")
        for agent, accuracy in after.items():
            found[rule][agent.split(" / ")[-1]][rate] = accuracy
    return found


def first() -> list[str]:
    """Names of the arms of the first round."""
    names = [arm["name"] for arm in tomllib.loads(SUITE.read_text())["arms"]]
    return [name for name in names if name.endswith((f"-rate-{LOW}", f"-rate-{HIGH}"))]


def second(found: Found) -> list[str]:
    """Names of the arms of the second round."""
    names = []
    for rule, agents in found.items():
        if "-floor-" not in rule:
            gain = mean(rates[HIGH] - rates[LOW] for rates in agents.values())
            names.append(f"{rule}-rate-{HIGHER if gain > 0 else LOWER}")
    return names


def print_choice(found: Found) -> None:
    print("| rule | agent | percent after training, by rate | chosen |\n|---|---|---|---|")
    lines = []
    for rule, agents in found.items():
        best = {agent: max(rates, key=rates.__getitem__) for agent, rates in agents.items()}
        for agent, rates in agents.items():
            cells = ", ".join(f"{rate}: {rates[rate]:.1f}" for rate in sorted(rates, key=float))
            print(f"| {rule} | {agent} | {cells} | {best[agent]} |")
        if "-floor-" not in rule:
            tables = ", ".join(f"{agent}.learning_rate = {rate}" for agent, rate in best.items())
            lines.append(f"{rule}: agents = {{ {tables} }}")
    scores = {
        rule: mean(rates[LOW] for rates in agents.values())
        for rule, agents in found.items()
        if "-floor-" in rule
    }
    lines.append(f"floor: {max(scores, key=scores.__getitem__)}")
    print("\n".join(lines))


def main() -> None:
    if "--first" in sys.argv:
        print(",".join(first()))
    elif "--next" in sys.argv:
        print(",".join(second(read())))
    else:
        print_choice(read())


if __name__ == "__main__":
    main()
