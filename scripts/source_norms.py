"""How large the gradients of a peer's samples are, relative to the learner's own, under attacks.

    python scripts/source_norms.py --out runs/attacks [--seed 1] [--steps 3]

Runs arms of scripts/attacks.py without caps and with `diagnostics.every = 1`. Prints for each step the
norm of a peer's gradient per unit of |advantage x weight|, divided by the same of the learner, and the
bad peer's parts of the weight and of the norms.
"""

import argparse
import json
import shutil
import warnings
from collections import Counter
from pathlib import Path

from attacks import ALGORITHMS, agent_of, config_of, store_peer, stored
from bad_peers import ATTACKS, BAD, HONEST, LEARNER, Tamper

from hacrl.runs import start
from hacrl.store.reader import RunReader
from hacrl.study.diagnostics.check import Diagnostics
from hacrl.training.hooks import Hooks


def measure(args: argparse.Namespace, algorithm: str, attack: str) -> list[str]:
    """One line per step: relative gradients of both peers, parts of the bad one."""
    stored_args = argparse.Namespace(**{**vars(args), "steps": 20})
    for peer in (HONEST, BAD):
        store_peer(stored_args, args.seed, peer)
    peers = [{"name": p, "replay": str(stored(stored_args, args.seed, p))} for p in (HONEST, BAD)]
    config = config_of(
        args,
        [agent_of(LEARNER, LEARNER), *peers],
        args.seed,
        algorithm,
        evaluation={"every": 0, "problems": 2},
        trust={"judge_again": True},
        diagnostics={"every": 1, "problems": 2, "samples": 2},
        log={"tensorboard": False, "samples": True},
    )
    path = args.out / f"norms-{args.seed}-{algorithm}-{attack}"
    shutil.rmtree(path, ignore_errors=True)
    tamper = Tamper(attack) if attack in ATTACKS else None
    start(config, path, hooks=Hooks(tamper=tamper, diagnostics=Diagnostics))
    return [step_line(RunReader(path), row, algorithm) for row in metric_rows(path)]


def metric_rows(path: Path) -> list[dict[str, float]]:
    return RunReader(path).metric_rows("train", LEARNER)


def step_line(run: RunReader, row: dict[str, float], algorithm: str) -> str:
    file = run.samples_folder(LEARNER) / f"step-{int(row['step']):06d}.jsonl"
    amounts, counts = Counter[str](), Counter[bool]()
    for s in map(json.loads, file.open()):
        amounts[s["source"]] += abs(s["advantage"] * s["weight"])
        counts[s["source"] == LEARNER] += 1
    norms = Counter[str]()
    for source in (LEARNER, HONEST, BAD):
        # The loss divides by own samples in overlap, by the samples of the block in the others.
        divisor = counts[True] if algorithm == "overlap" else counts[source == LEARNER]
        norms[source] = (row.get(f"diagnostics/gradient_norm/{source}") or 0.0) * divisor
    unit = norms[LEARNER] / amounts[LEARNER]
    relative = {p: norms[p] / amounts[p] / unit for p in (HONEST, BAD) if amounts[p]}
    text = ", ".join(f"{p} {x:.2f}" for p, x in relative.items())
    weight, norm = (x[BAD] / x.total() for x in (amounts, norms))
    return f"{text}; {BAD}: {weight:.2f} of the weight, {norm:.2f} of the norms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for algorithm in ALGORITHMS:
        for attack in ("honest", "poison", "poison-likely", "answer-key", "flood"):
            for line in measure(args, algorithm, attack):
                print(f"{algorithm}, {attack}: {line}", flush=True)


if __name__ == "__main__":
    main()
