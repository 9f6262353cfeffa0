"""Choose learning rates of the pretrained pair, and hacpo's floor, from the runs of real-rates.toml.

    python scripts/choose_rates.py [--kept FILE]            # the table and the chosen settings
    python scripts/choose_rates.py [--kept FILE] --first    # arms of the first round, for --only
    python scripts/choose_rates.py [--kept FILE] --next     # arms of the second round

Arms are called RULE-rate-RATE, or RULE-rate-A-and-B with rate A for SmolLM2 and B for Gemma. The first
round has two rates for every rule, and three floors of hacpo at the lower rate. The second round has one
more rate for each rule and agent: a higher one where the higher rate was better, else a lower one. It
also has the best floor at the second rate. For every rule and agent the rate with the largest mean
held-out accuracy over the development seeds is chosen.
"""

import argparse
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


def read(kept: Path) -> Found:
    """Held-out accuracies of the kept runs."""
    found: Found = defaultdict(lambda: defaultdict(dict))
    for arm, after in accuracies(kept, SUITE).items():
        rule, _, rates = arm.partition("-rate-")
        rate, _, other = rates.partition("-and-")
        for agent, accuracy in after.items():
            name = agent.split(" / ")[-1]
            found[rule][name][other or rate if name == "gemma3" else rate] = accuracy
    return found


def first() -> list[str]:
    """Names of the arms of the first round."""
    names = [arm["name"] for arm in tomllib.loads(SUITE.read_text())["arms"]]
    high = [name for name in names if name.endswith(f"-rate-{HIGH}") and "-floor-" not in name]
    return [name for name in names if name.endswith(f"-rate-{LOW}")] + high


def best_floor(found: Found) -> str:
    """The floor with the largest mean over both agents at the lower rate, e.g. "hacpo-floor-0.2"."""
    floors = [rule for rule in found if "-floor-" in rule]
    return max(floors, key=lambda rule: mean(rates[LOW] for rates in found[rule].values()))


def second(found: Found) -> list[str]:
    """Names of the arms of the second round."""
    names = [f"{best_floor(found)}-rate-{HIGH}"]
    for rule, agents in found.items():
        if "-floor-" not in rule:
            gains = {agent: rates[HIGH] - rates[LOW] for agent, rates in agents.items()}
            both = HIGHER if mean(gains.values()) > 0 else LOWER
            apart = gains["smollm2"] > 0 > gains["gemma3"]
            names.append(f"{rule}-rate-{f'{HIGHER}-and-{LOWER}' if apart else both}")
    return names


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
    parser.add_argument("--first", action="store_true", help="print the arms of the first round")
    parser.add_argument("--next", action="store_true", help="print the arms of the second round")
    given = parser.parse_args()
    if not given.first and not given.kept.is_file():
        parser.error(f"--kept {given.kept}: there is no such file")
    if given.first:
        print(",".join(first()))
    elif given.next:
        print(",".join(second(read(given.kept))))
    else:
        print_choice(read(given.kept))


if __name__ == "__main__":
    main()
