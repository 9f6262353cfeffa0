"""What a bad peer does to a learner, without and with the defences of `[trust]`.

    python scripts/attacks.py --out runs/attacks --parallel 16
    python scripts/attacks.py --out runs/attacks --only flood --algorithms hacpo --seeds 2
    python scripts/attacks.py --table runs/attacks/results.jsonl

A team of three pocket models: wren learns, heron is an honest peer, finch is the bad one. heron and
finch replay the batches of a run in which each of them learned alone, so all arms of a seed have the
same peers and only wren is trained. Every finished run adds one line to OUT/results.jsonl and is not
repeated. Seeds are the outermost loop.

The table compares wren's held-out accuracy with the same team without finch (same seed, no defences).
"""

import argparse
import json
import multiprocessing
import shutil
import time
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bad_peers import ATTACKS, BAD, HONEST, LEARNER, STALE, TRIGGERS, TURN, Tamper

from hacrl.config import Config, parse_config
from hacrl.pocket import POCKET_CONFIG
from hacrl.runs import start
from hacrl.statistics import Estimate, t_interval
from hacrl.store.reader import RunReader
from hacrl.training.hooks import Hooks

ALGORITHMS = ("hacpo", "naive", "overlap")
TRUST = {
    "judge_again": True,
    "quarantine": True,
    "max_source_fraction": 0.5,
    "max_source_weight": 0.4,
    "max_ratio": 2.0,
}
RIGHT_ANSWERS = ("poison", "poison-likely", "answer-key")
"""Attacks that own verdicts cannot tell, also run with STRICT."""
STRICT = {**TRUST, "min_own_quantile": 0.01}
TEAMS = {"alone": (), "without": (HONEST,), "honest": (HONEST, BAD)}
"""Baselines -> the learner's peers."""


# ---------------------------------------------------------------- runs


@dataclass(frozen=True, order=True)
class Arm:
    """One run of the grid. `alone` is the same for all algorithms and is run once."""

    seed: int
    attack: str
    algorithm: str
    defended: bool | str  # "strict": with STRICT instead of TRUST


def grid(args: argparse.Namespace) -> Iterator[Arm]:
    """All runs, the most important first: seeds, then baselines, then attacks."""
    names = args.algorithms
    arms: list[tuple[str, str, bool | str]] = [("alone", "hacpo", False)]
    arms += [(team, name, False) for team in ("without", "honest") for name in names]
    arms += [("honest", name, on) for on in (True, "strict") for name in names]
    for attack in args.only or ATTACKS:
        levels = (True, "strict", False) if attack in RIGHT_ANSWERS else (True, False)
        arms += [(attack, name, on) for on in levels for name in names]
    for seed in range(args.first_seed, args.seeds):
        for attack, algorithm, defended in arms:
            seeds = 5 if defended == "strict" else ATTACKS.get(attack, (None, 10))[1]
            if seed < seeds:
                yield Arm(seed, attack, algorithm, defended)


def config_of(
    args: argparse.Namespace, agents: Sequence[Any], seed: int, algorithm: str, **settings: Any
) -> Config:
    tree = tomllib.loads(POCKET_CONFIG.read_text())
    tree["algorithm"]["name"] = algorithm
    common = {
        "seed": seed,
        "steps": args.steps,
        "prompts_per_step": args.prompts,
        "minibatch_samples": args.prompts * 8,
        "checkpoint": {"save": False},
        "log": {"tensorboard": False, "samples": False},
        "agents": agents,
    }
    tree["verifier"]["workers"] = 1
    return parse_config(tree | common | settings)


def agent_of(name: str, model: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": f"pocket:{model}", "learning_rate": 2e-4, **more}


def stored(args: argparse.Namespace, seed: int, peer: str) -> Path:
    """The run that a peer is replayed from."""
    return Path(args.out) / f"peers-{args.steps}-{args.prompts}" / f"{peer}-{seed}"


def store_peer(args: argparse.Namespace, seed: int, peer: str) -> None:
    """Train a peer alone; a stale one learns one step."""
    path = stored(args, seed, peer)
    if not path.exists():
        agent = agent_of(peer, peer)
        if peer == STALE:
            agent = agent_of(peer, BAD, schedule="linear", schedule_steps=1)
        config = config_of(args, [agent], seed, "gspo", evaluation={"problems": 0})
        shutil.rmtree(part := path.with_name(path.name + ".part"), ignore_errors=True)
        start(config, part)
        part.rename(path)


def identity(args: argparse.Namespace, arm: Arm) -> dict[str, Any]:
    """What tells runs of a results file apart."""
    sizes = {"steps": args.steps, "prompts": args.prompts, "problems": args.problems}
    return {**asdict(arm), **sizes}


def run_arm(args: argparse.Namespace, arm: Arm) -> dict[str, Any]:
    """Train wren in one arm and return its line of the results."""
    peers = []
    for name in TEAMS.get(arm.attack, TEAMS["honest"]):
        source = STALE if name == BAD and arm.attack == STALE else name
        peers.append({"name": name, "replay": str(stored(args, arm.seed, source))})
    trust = {False: {}, True: TRUST, "strict": STRICT}[arm.defended]
    config = config_of(
        args,
        [agent_of(LEARNER, LEARNER), *peers],
        arm.seed,
        arm.algorithm,
        evaluation={"every": 0, "problems": args.problems, "samples": 4},
        trust=trust,
    )
    path = Path(args.out) / "-".join(str(v) for v in asdict(arm).values())
    shutil.rmtree(path, ignore_errors=True)
    began = time.process_time()
    start(config, path, hooks=Hooks(tamper=Tamper(arm.attack) if arm.attack in ATTACKS else None))
    row = {**identity(args, arm), **measured(RunReader(path), args.steps)}
    if not args.keep:
        shutil.rmtree(path)
    return {**row, "seconds": round(time.process_time() - began, 1)}


def measured(run: RunReader, steps: int) -> dict[str, Any]:
    before, after = run.metric_rows("evaluation", LEARNER)
    replies = (run.evaluation(steps, LEARNER) / "replies.jsonl").open()
    trained = run.metric_rows("train", LEARNER)
    out = {
        peer: [row["step"] for row in trained if row.get(f"trust/quarantined/{peer}")]
        for peer in (HONEST, BAD)
    }
    reasons = [row["text"] for row in run.notes() if "(quarantine)" in row["text"]]
    return {
        "before": before["accuracy"],
        "accuracy": after["accuracy"],
        "trigger": fmean(json.loads(line)["reply"].startswith(TRIGGERS) for line in replies),
        "used": {p: sum(row.get(f"samples/kept/{p}", 0) for row in trained) for p in (HONEST, BAD)},
        "quarantined": out,
        "reasons": reasons,
    }


def work(task: tuple[argparse.Namespace, Arm | tuple[int, str]]) -> dict[str, Any] | None:
    """Make one run, in a worker process."""
    warnings.simplefilter("ignore")
    args, what = task
    return run_arm(args, what) if isinstance(what, Arm) else store_peer(args, *what)


def train(args: argparse.Namespace) -> None:
    """Make all runs of the grid that OUT/results.jsonl does not have."""
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    rows = map(json.loads, results.open()) if results.exists() else ()
    done = [{k: row[k] for k in identity(args, Arm(0, "", "", False))} for row in rows]
    todo = [arm for arm in grid(args) if identity(args, arm) not in done]
    peers = [(seed, p) for seed in sorted({arm.seed for arm in todo}) for p in (BAD, HONEST, STALE)]
    print(f"{len(todo)} runs to make, {len(done)} are done", flush=True)
    spawned = multiprocessing.get_context("spawn")
    with spawned.Pool(args.parallel) as pool, results.open("a") as file:
        for _ in pool.imap_unordered(work, [(args, peer) for peer in peers]):
            pass
        began = time.monotonic()
        for n, row in enumerate(pool.imap_unordered(work, [(args, arm) for arm in todo]), start=1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            if n % args.parallel == 0:
                print(f"{n} of {len(todo)}, {time.monotonic() - began:.0f} s", flush=True)


# ---------------------------------------------------------------- the table

Results = dict[tuple[str, str, bool | str], dict[int, dict[str, Any]]]


def loss(
    results: Results, attack: str, algorithm: str, defended: bool | str, team: str
) -> Estimate:
    """Points that wren loses against a baseline, over the seeds of both."""
    base = results["alone", "hacpo", False] if team == "alone" else results[team, algorithm, False]
    found = results[attack, algorithm, defended]
    seeds = sorted({*base} & {*found})
    return t_interval([100 * (base[s]["accuracy"] - found[s]["accuracy"]) for s in seeds])


def verdict(found: Estimate) -> str:
    """held: at most 1 point lost, and the interval ends below 3. failed: the interval is above 1."""
    if found.mean <= 1 and found.high < 3:
        return "held"
    return "failed" if found.low > 1 else "open"


def delay(rows: Sequence[dict[str, Any]], attack: str) -> str:
    """Steps from the first bad batch to the first one that was left out: median, largest, count."""
    first = TURN if attack == "turncoat" else 0
    found = [min(row["quarantined"][BAD]) - first for row in rows if row["quarantined"][BAD]]
    if not found:
        return "never"
    return f"{median(found):g} (at most {max(found)}), {len(found)} of {len(rows)}"


def table(path: Path) -> Iterator[str]:
    """The lines of the Markdown tables."""
    results: Results = defaultdict(dict)
    for row in map(json.loads, path.open()):
        results[row["attack"], row["algorithm"], row["defended"]][row["seed"]] = row
    for level in (True, "strict"):
        yield from attack_table(results, level)
        yield ""
    yield from false_alarms(results)


def attack_table(results: Results, level: bool | str) -> Iterator[str]:
    """Attacks without defences and with those of this level."""
    yield (
        "| attack | algorithm | seeds off, on | off: lost | on: lost | on: lost against alone "
        "| trigger off / on | quarantine delay | off | on |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for attack in ("honest", *ATTACKS):
        for algorithm in ALGORITHMS:
            off, on = (results[attack, algorithm, d] for d in (False, level))
            if not off or not on:
                continue
            lost = [loss(results, attack, algorithm, d, "without") for d in (False, level)]
            alone = loss(results, attack, algorithm, level, "alone")
            triggers = [100 * fmean(row["trigger"] for row in x.values()) for x in (off, on)]
            caught = delay(list(on.values()), attack) if attack != "honest" else "-"
            cells = [attack, algorithm, f"{len(off)}, {len(on)}", *map(points, [*lost, alone])]
            cells += [" / ".join(f"{x:.1f} %" for x in triggers), caught, *map(verdict, lost)]
            yield f"| {' | '.join(cells)} |"


def points(found: Estimate) -> str:
    interval = f" [{found.low:+.1f}, {found.high:+.1f}]" if found.count > 1 else ""
    return f"{found.mean:+.1f}{interval}"


def false_alarms(results: Results) -> Iterator[str]:
    """Quarantines of honest peers: both in honest teams, heron in all others."""
    yield "| algorithm | steps x honest peers | false alarms | of them in teams without a bad peer |"
    yield "|---|---|---|---|"
    for algorithm in ALGORITHMS:
        steps = alarms = plain = 0
        for (attack, name, defended), rows in results.items():
            if name == algorithm and defended:
                honest = (HONEST, BAD) if attack == "honest" else (HONEST,)
                for row in rows.values():
                    entered = sum(bool(row["quarantined"][peer]) for peer in honest)
                    steps, alarms = steps + row["steps"] * len(honest), alarms + entered
                    plain += entered if attack == "honest" else 0
        yield f"| {algorithm} | {steps} | {alarms} | {plain} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument(
        "--table", type=Path, help="print the tables of a results file; train nothing"
    )
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), help="attacks")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--problems", type=int, default=480, help="held-out problems")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    args = parser.parse_args(arguments)
    if args.table:
        print("\n".join(table(args.table)))
    else:
        train(args)


if __name__ == "__main__":
    main()
