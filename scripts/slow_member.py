"""One member is four times slower: what waiting costs, and what late batches give back.

    python scripts/slow_member.py [--seeds 5] [--seconds 60] [--staleness 4] [--slowness 4]

Two members of one size, the second slowed down by sleeping, train over a hub for the same time: with
deadline and staleness, and waiting for each other. Prints for every seed the fraction of time that the
fast member waited, the fraction of the slow member's batches that it used, and the held-out accuracy of
both members at the end of that time.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "storms"))
from hub_process import HubProcess
from member_process import MemberProcess, mine

from hacrl.store.reader import RunReader

CHARTER: dict[str, Any] = {
    "names": ("ant", "bee"),
    "steps": 400,
    "prompts_per_step": 8,
    "samples_per_prompt": 4,
    "max_prompt_tokens": 32,
    "max_response_tokens": 24,
    "max_batch_bytes": 2**20,
}
SETTINGS: dict[str, Any] = {
    "minibatch_samples": 32,
    "evaluation": {"every": 4, "problems": 60, "temperature": 0.0},
    "checkpoint": {"save": False},
}


def waited(run: RunReader) -> float:
    """Fraction of the time that a member waited for others, without the first step."""
    rows = [json.loads(line) for line in (run.path / "times.jsonl").read_text().splitlines()][1:]
    seconds = [sum(v for v in row.values() if isinstance(v, float)) for row in rows]
    return sum(row.get("wait", 0.0) for row in rows) / max(sum(seconds), 1e-9)


def last_accuracy(run: RunReader, name: str) -> float:
    return float(run.metric_rows("evaluation", name)[-1]["accuracy"])


def train(
    folder: Path, seed: int, seconds: float, slowness: float, **charter: Any
) -> dict[str, Any]:
    """Train for `seconds` from the first closed step on."""
    folder.mkdir(parents=True)
    with HubProcess(folder, **CHARTER, seed=seed, **charter) as hub:
        ant = MemberProcess(hub, "ant", mine("wren", **SETTINGS))
        bee = MemberProcess(hub, "bee", mine("wren-2", **SETTINGS))
        bee.slowness = slowness
        try:
            ant.start()
            bee.start()
            while hub.metrics()["hacrl_hub_open_step"] < 1:
                time.sleep(0.1)
            time.sleep(seconds)
        finally:
            ant.kill()
            bee.kill()
    rows = ant.reader().metric_rows("train", "ant")
    sent = len(list((bee.run / "hub" / "receipts").glob("*.json")))
    in_time = sum("capability/bee" in row and row.get("samples/kept/bee", 0) > 0 for row in rows)
    late = sum(row.get("late/batches", 0.0) for row in rows)
    return {
        "steps": len(rows),
        "waited": waited(ant.reader()),
        "sent": sent,
        "used": (in_time + late) / max(sent, 1),
        "ant": last_accuracy(ant.reader(), "ant"),
        "bee": last_accuracy(bee.reader(), "bee"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--slowness", type=float, default=4)
    parser.add_argument("--deadline", type=float, default=0.02, help="seconds, with staleness")
    args = parser.parse_args()
    late = {"staleness": args.staleness, "deadline": args.deadline}
    found: dict[str, list[dict[str, Any]]] = {"staleness": [], "waiting": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for name, charter in (("staleness", late), ("waiting", {})):
                place = Path(folder) / f"{name}-{seed}"
                row = train(place, seed, args.seconds, args.slowness, **charter)
                found[name].append(row)
                values = ", ".join(f"{k} {v:.3g}" for k, v in row.items())
                print(f"seed {seed}, {name}: {values}", flush=True)
    for name, rows in found.items():
        means = ", ".join(f"{key} {fmean(row[key] for row in rows):.3f}" for key in rows[0])
        print(f"mean of {len(rows)} seeds, {name}: {means}")


if __name__ == "__main__":
    main()
