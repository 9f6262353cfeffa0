"""Choose the learning rates of each rule and agent, and hacpo's floor, from runs on development seeds.

    python scripts/choose_rates.py real-rates    # of configs/suites/real-rates.toml
    python scripts/choose_rates.py long-rates

The runs are those of docs/results/SUITE.jsonl (`--kept` names another file). Arms are called
RULE-rate-A-and-B, with rate A for the first agent of the suite and B for the second. For every rule and
agent the rate with the largest mean held-out accuracy over development seeds and evaluations is chosen,
and of hacpo's floors the one with the largest mean over both agents.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from choose_rule import accuracies

ROOT = Path(__file__).resolve().parents[1]

Found = dict[str, dict[str, dict[str, float]]]  # rule -> agent -> rate -> percent


def read(suite: str, kept: Path) -> Found:
    """Held-out accuracies of the kept runs."""
    found: Found = defaultdict(lambda: defaultdict(dict))
    for arm, after in accuracies(suite, kept).items():
        rule, _, rates = arm.partition("-rate-")
        for (name, accuracy), rate in zip(after.items(), rates.split("-and-"), strict=True):
            found[rule][name.split(" / ")[-1]][rate] = accuracy
    return found


def best_floor(found: Found) -> list[str]:
    """The floor with the largest mean over both agents, e.g. ["hacpo-floor-0.2"], if there are any."""
    floors = [rule for rule in found if "-floor-" in rule]
    floors.sort(key=lambda rule: mean(max(r.values()) for r in found[rule].values()))
    return floors[-1:]


def chosen(found: Found) -> dict[str, dict[str, str]]:
    """Rule -> agent -> rate, for every rule and the best floor."""
    kept = [rule for rule in found if "-floor-" not in rule] + best_floor(found)
    return {
        rule: {agent: max(rates, key=rates.__getitem__) for agent, rates in found[rule].items()}
        for rule in kept
    }


def at_the_end(rate: str, rates: Iterable[str]) -> bool:
    """Whether a rate is the smallest or the largest of several: a better one may lie outside."""
    values = [float(r) for r in rates]
    return len(values) > 1 and float(rate) in (min(values), max(values))


def print_choice(found: Found) -> None:
    """Print the accuracies as a table, then the chosen overrides. A choice at the end of the tried
    rates is marked."""
    print("| rule | agent | percent, by rate | chosen |\n|---|---|---|---|")
    best = chosen(found)
    for rule, agents in found.items():
        for agent, rates in agents.items():
            cells = ", ".join(f"{rate}: {rates[rate]:.1f}" for rate in sorted(rates, key=float))
            choice = best.get(rule, {}).get(agent, "")
            mark = " (end of the tried rates)" if choice and at_the_end(choice, rates) else ""
            print(f"| {rule} | {agent} | {cells} | {choice}{mark} |")
    for rule, choice in best.items():
        print(rule, *(f"agents.{agent}.learning_rate={rate}" for agent, rate in choice.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose learning rates on development seeds.")
    parser.add_argument("suite", help="a suite of configs/suites, e.g. real-rates")
    parser.add_argument("--kept", type=Path, help="its kept runs (docs/results/SUITE.jsonl)")
    given = parser.parse_args()
    kept = given.kept or ROOT / "docs" / "results" / f"{given.suite}.jsonl"
    if not kept.is_file():
        parser.error(f"{kept}: there is no such file")
    print_choice(read(given.suite, kept))


if __name__ == "__main__":
    main()
