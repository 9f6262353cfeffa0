"""How often a team's models solve a task before training, and how long their replies are.

    python benchmarks/pass_at_k.py CONFIG --vary temperature=1 --vary temperature=0.7 [key=value]

Every --vary is one line of overrides, split at spaces; without it the config is measured as it is.
Each row: the mean number of reply tokens; in percent pass@1, pass@8, the replies that were cut, and of
the replies to a problem those that are different texts up to the last number.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from hacrl.config import load_config
from hacrl.policy.policy import Policy
from hacrl.replies import Row, count
from hacrl.tasks import make_task
from hacrl.training.evaluate import ask
from hacrl.verify import VerifierPool


def different(rows: Sequence[Row]) -> float:
    """Of the replies to a problem the fraction of different texts up to the last number."""
    begins: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        begins[row["problem"]].append(re.sub(r"-?\d+\D*$", "", row["reply"]))
    return fmean(len(set(texts)) / len(texts) for texts in begins.values())


def measure(given: argparse.Namespace, line: str) -> None:
    """Print one row for every agent of a config."""
    samples: int = given.samples
    config = load_config(given.config, [*line.split(), *given.overrides])
    asked = make_task(config.task, config.seed, given.config.parent).held_out(given.problems)
    for agent in config.agents:
        runtime = config.runtime
        policy = Policy(agent, device=runtime.device, temperature=config.temperature, beta=0.0)
        with VerifierPool(config.verifier) as verifier:
            rows = ask(
                policy,
                asked,
                verifier,
                seed=config.seed,
                samples=samples,
                temperature=config.temperature,
                prompt_limit=config.prompt_limit(agent),
                limit=config.response_limit(agent),
            )
        found = count(rows)
        rates = [found.passes[1], found.passes[samples], found.truncated, different(rows)]
        cells = " | ".join(f"{100 * rate:.1f}" for rate in rates)
        print(
            f"| {agent.name} | {line} | {len(asked)} x {samples} "
            f"| {found.reply_tokens:.0f} | {cells} |",
            flush=True,
        )
        for row in rows[: given.show * samples : samples]:
            print(f"    {row['answer']} {row['status']}: {row['reply']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--vary", action="append", default=[], help="overrides of one candidate")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--show", type=int, default=0, help="replies to print for each row")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    print(
        f"| agent | overrides | problems | tokens | pass@1 | pass@{given.samples} | cut | different |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for line in given.vary or [""]:
        measure(given, line)


if __name__ == "__main__":
    main()
