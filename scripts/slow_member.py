"""One member is four times slower: what waiting costs, and what late batches give back.

    python scripts/slow_member.py [--seeds 5] [--seconds 60] [--staleness 4] [--slowness 4]

Two members of one size, the second slowed down by sleeping, train over a hub for the same time: with
deadline and staleness, and waiting for each other. Prints for every seed:

    steps      that the fast member has learned
    waited     fraction of the fast member's time, by the clock on the wall, between the receipt of its
               batch and the step's snapshot: the deadline, the closing of the step and one request.
               Sending its batch and copying those of others are not waiting
    produced   batches that the slow member signed until the fast member's last step was closed
    used       fraction of them that the fast member trained on, in time or late
    ant, bee   held-out accuracy of the fast and of the slow member at the end

A step of these tiny models takes less than a second, so the default deadline is 5 milliseconds.
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


def closed(member: MemberProcess, step: int) -> float:
    """When a member received the snapshot of a step."""
    return (member.run / "hub" / "snapshots" / f"step-{step:06d}.json").stat().st_mtime


def waited(member: MemberProcess) -> float:
    """Fraction of the time that a member waited for others, from its first snapshot to the last."""
    lines = (member.run / "times.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1:]
    seconds = closed(member, rows[-1]["step"]) - closed(member, rows[0]["step"] - 1)
    return float(sum(row.get("wait", 0.0) for row in rows) / seconds)


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
    signed = (bee.run / "hub" / "envelopes").glob("*.json")
    end = closed(ant, rows[-1]["step"])
    produced = sum(path.stat().st_mtime <= end for path in signed)
    in_time = sum("capability/bee" in row and row.get("samples/kept/bee", 0) > 0 for row in rows)
    late = sum(row.get("late/batches", 0.0) for row in rows)
    return {
        "steps": len(rows),
        "waited": waited(ant),
        "produced": produced,
        "used": (in_time + late) / max(produced, 1),
        "ant": last_accuracy(ant.reader(), "ant"),
        "bee": last_accuracy(bee.reader(), "bee"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--slowness", type=float, default=4)
    parser.add_argument("--deadline", type=float, default=0.005, help="seconds, with staleness")
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
