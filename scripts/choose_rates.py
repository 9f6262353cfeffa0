"""Choose learning rates of the pretrained pair, and hacpo's floor, from the runs of real-rates.toml.

    python scripts/choose_rates.py [--kept FILE]    # the table and the chosen settings

Arms are called RULE-rate-A-and-B, with rate A for SmolLM2 and B for Gemma. For every rule and agent the
rate with the largest mean held-out accuracy over the development seeds is chosen, and of hacpo's floors
the one with the largest mean over both agents.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from choose_rule import accuracies

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "configs" / "suites" / "real-rates.toml"
KEPT = ROOT / "docs" / "results" / "real-rates.jsonl"

Found = dict[str, dict[str, dict[str, float]]]  # rule -> agent -> rate -> percent after training


def read(kept: Path) -> Found:
    """Held-out accuracies of the kept runs."""
    found: Found = defaultdict(lambda: defaultdict(dict))
    for arm, after in accuracies(kept, SUITE).items():
        rule, _, rates = arm.partition("-rate-")
        smollm2, _, gemma3 = rates.partition("-and-")
        for agent, accuracy in after.items():
            name = agent.split(" / ")[-1]
            found[rule][name][gemma3 if name == "gemma3" else smollm2] = accuracy
    return found


def best_floor(found: Found) -> str:
    """The floor with the largest mean over both agents, e.g. "hacpo-floor-0.2"."""
    floors = [rule for rule in found if "-floor-" in rule]
    return max(floors, key=lambda rule: mean(max(r.values()) for r in found[rule].values()))


def chosen(found: Found) -> dict[str, dict[str, str]]:
    """Rule -> agent -> rate, for every rule and the best floor."""
    kept = [rule for rule in found if "-floor-" not in rule] + [best_floor(found)]
    return {
        rule: {agent: max(rates, key=rates.__getitem__) for agent, rates in found[rule].items()}
        for rule in kept
    }


def print_choice(found: Found) -> None:
    """Print the accuracies as a table, then the chosen overrides."""
    print("| rule | agent | percent after training, by rate | chosen |\n|---|---|---|---|")
    best = chosen(found)
    for rule, agents in found.items():
        for agent, rates in agents.items():
            cells = ", ".join(f"{rate}: {rates[rate]:.1f}" for rate in sorted(rates, key=float))
            print(f"| {rule} | {agent} | {cells} | {best.get(rule, {}).get(agent, '')} |")
    for rule, choice in best.items():
        print(rule, *(f"agents.{agent}.learning_rate={rate}" for agent, rate in choice.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Choose the rates of configs/suites/real-pair.toml."
    )
    parser.add_argument("--kept", type=Path, default=KEPT, help="kept runs of real-rates.toml")
    given = parser.parse_args()
    if not given.kept.is_file():
        parser.error(f"--kept {given.kept}: there is no such file")
    print_choice(read(given.kept))


if __name__ == "__main__":
    main()
