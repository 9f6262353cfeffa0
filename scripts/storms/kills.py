"""Kill and pause pocket runs at random moments, resume them, and compare them with undisturbed ones.

    python scripts/storms/kills.py --count 300
    python scripts/storms/kills.py --count 30 --setups ray

An interruption is SIGKILL of the run, a pause of all its processes (SIGSTOP, SIGCONT) that may be
longer than the verifier's timeout, or SIGKILL of one verifier worker. Every file of a run must be
equal, byte for byte, to that of an undisturbed run: metrics, journals, pool, samples, evaluations,
checkpoints, fingerprint. Prints one line per run and a summary; exits with 1 on a finding.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from process_table import family

import hacrl.runs
import hacrl.training.local  # torch, before the first fork

NOT_COMPARED = {
    "times.jsonl",
    "notes.jsonl",
    "counts.json",
    "environment.json",
    ".lock",
    "tensorboard",
}
"""counts.json has the numbers of rows of times and notes."""
KINDS = {"kill": 6, "pause": 2, "worker": 2}
"""Kind of interruption -> how often, relative to the others."""
TIMEOUT, LONGEST_PAUSE = 3.0, 5.0
"""Seconds of a verifier call, and of a pause."""
REWARD = "def score(completion, answer):\n    return 1.0 if answer in completion else 0.0\n"


def agent(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "model": f"pocket:{name}", "learning_rate": 2e-4, **settings}


def team(*agents: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "steps": 6,
        "prompts_per_step": 6,
        "samples_per_prompt": 4,
        "minibatch_samples": 12,
        "max_prompt_tokens": 64,
        "max_response_tokens": 24,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number", "workers": 2, "timeout": TIMEOUT},
        "algorithm": {"name": "hacpo", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
        "evaluation": {"every": 2, "problems": 12},
        "checkpoint": {"every": 2},
        "runtime": {"threads": 1, "device": "cpu"},
        "log": {"tensorboard": False},
        "agents": list(agents),
        **settings,
    }


def own_data(folder: Path) -> dict[str, Any]:
    """Rows without ids, a reward function in a file, TensorBoard."""
    rows = [{"question": f"{i}+{i}", "answer": 2 * i} for i in range(10, 60)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "storm_rewards.py").write_text(REWARD)
    options = {"path": f"{folder}/storm_rewards:score"}
    return team(
        agent("wren"),
        agent("finch"),
        task={"kind": "jsonl", "train": str(folder / "train.jsonl")},
        verifier={"kind": "function", "options": options, "workers": 2, "timeout": TIMEOUT},
        evaluation={"every": 2, "problems": "all"},
        log={"tensorboard": True},
    )


SETUPS: dict[str, Any] = {
    "hacpo": lambda folder: team(agent("wren"), agent("finch")),
    "frozen": lambda folder: team(agent("wren"), agent("finch"), agent("heron", learn=False)),
    "gspo": lambda folder: team(agent("wren"), algorithm={"name": "gspo"}, checkpoint={"every": 0}),
    "overlap": lambda folder: team(
        agent("wren"), agent("finch"), algorithm={"name": "overlap"}, checkpoint={"every": 1}
    ),
    "own_data": own_data,
    "processes": lambda folder: team(
        agent("wren"), agent("finch"), runtime={"kind": "processes", "threads": 1, "device": "cpu"}
    ),
    "ray": lambda folder: team(
        agent("wren"), agent("finch"), runtime={"kind": "ray", "threads": 1, "device": "cpu"}
    ),
}


def start(config: dict[str, Any], run: Path) -> int:
    """Train or resume the run in a forked process; returns its id. Its output goes to RUN.log."""
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open(run.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        warnings.simplefilter("ignore")
        begun = (run / "config.toml").exists()
        _ = hacrl.resume(run) if begun else hacrl.train(config, run)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def ended(child: int, seconds: float) -> int | None:
    """Wait at most so long for the process; its exit code, or None if it still runs."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def interrupt(child: int, kind: str, draw: random.Random) -> bool:
    """Interrupt the run; False if there is no such process."""
    if kind == "kill":
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True
    if kind == "worker":
        found = {p: q for p, (q, text) in family(child).items() if "hacrl.verify.worker" in text}
        workers = [p for p, parent in found.items() if parent not in found]
        return bool(workers) and _signal([draw.choice(workers)], signal.SIGKILL)
    everyone = list(family(child))
    _signal(everyone, signal.SIGSTOP)
    time.sleep(draw.uniform(0.2, LONGEST_PAUSE))
    return _signal(everyone, signal.SIGCONT)


def _signal(processes: list[int], number: signal.Signals) -> bool:
    sent = False
    for process in processes:
        try:
            os.kill(process, number)
            sent = True
        except ProcessLookupError:
            continue
    return sent


def contents(run: Path) -> dict[str, str]:
    """Path -> sha256 of every file that must be equal."""
    files = (p for p in run.rglob("*") if p.is_file())
    names = {p: p.relative_to(run) for p in files}
    return {
        str(name): hashlib.sha256(p.read_bytes()).hexdigest()
        for p, name in names.items()
        if name.parts[0] not in NOT_COMPARED
    }


def disturbed(
    config: dict[str, Any], run: Path, wanted: int, seconds: float, draw: random.Random
) -> tuple[Counter[str], str]:
    """Train a run with `wanted` interruptions; returns those by kind, and what went wrong."""
    done: Counter[str] = Counter()
    child = start(config, run)
    while done.total() < wanted:
        code = ended(child, draw.uniform(0.1, seconds))
        if code is not None:
            break
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        if interrupt(child, kind, draw):
            done[kind] += 1
        if kind == "kill":
            child = start(config, run)
    else:
        code = ended(child, 600)
    if code is None:
        os.kill(child, signal.SIGKILL)
        return done, "did not end within 600 s"
    log = run.with_suffix(".log").read_text().strip().splitlines()
    return done, f"exit code {code}: {log[-1] if log else ''}" if code else ""


def difference(run: Path, reference: Path) -> str:
    """Why the run is not that of an undisturbed one; empty if it is."""
    mine, theirs = contents(run), contents(reference)
    differ = sorted(p for p in mine.keys() | theirs.keys() if mine.get(p) != theirs.get(p))
    if (run / "notes.jsonl").exists() and "changed inputs" in (run / "notes.jsonl").read_text():
        differ.append("notes.jsonl: inputs changed")
    return ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")


def storm(count: int, seed: int, setups: list[str], folder: Path) -> list[str]:
    """Interrupt runs of the setups in turn, `count` times in all; returns the findings."""
    draw, findings = random.Random(seed), []
    total: Counter[str] = Counter()
    configs: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    runs = 0
    while total.total() < count:
        name = setups[runs % len(setups)]
        place = folder / name
        if name not in seconds:
            place.mkdir()
            configs[name] = SETUPS[name](place)
            begin = time.monotonic()
            if ended(start(configs[name], place / "undisturbed"), 600):
                raise SystemExit(f"{name}: {(place / 'undisturbed.log').read_text()[-500:]}")
            seconds[name] = time.monotonic() - begin
        runs += 1
        wanted = min(draw.randint(3, 8), count - total.total())
        run = place / f"run-{runs}"
        done, wrong = disturbed(configs[name], run, wanted, seconds[name] / 2, draw)
        total += done
        wrong = wrong or difference(run, place / "undisturbed")
        print(f"{total.total()}/{count}, {name}: {dict(done)}: {wrong or 'equal'}", flush=True)
        if wrong:
            findings.append(f"{name}, run {runs}, {dict(done)}: {wrong}")
    kinds = ", ".join(f"{number} {kind}" for kind, number in total.items())
    print(
        f"{total.total()} interruptions ({kinds}) in {runs} runs of {len(seconds)} setups: "
        f"{runs - len(findings)} of {runs} equal to undisturbed ones, {len(findings)} findings"
    )
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="interruptions in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--setups", nargs="+", choices=SETUPS, help="default: all that can run here"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    args = parser.parse_args()
    usable = [n for n in SETUPS if n != "ray" or importlib.util.find_spec("ray")]
    if args.keep:
        args.keep.mkdir(parents=True)
        return int(bool(storm(args.count, args.seed, args.setups or usable, args.keep.absolute())))
    with tempfile.TemporaryDirectory() as folder:
        return int(bool(storm(args.count, args.seed, args.setups or usable, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
