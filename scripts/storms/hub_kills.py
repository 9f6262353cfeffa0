"""Kill -9 a hub and its members at random moments and compare their runs with an undisturbed one.

    python scripts/storms/hub_kills.py --count 100 [--runs 4] [--steps 6] [--databases sqlite postgres]

The runs of three members use SQLite and PostgreSQL in turn. After the restarts metrics, evaluations and
weights of every member must equal those of an undisturbed run, every batch that was acknowledged must be
in the snapshot of its step, and all members must have the same snapshots. Prints one line per finding
and a summary; exits with 1 on a finding.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from hub_process import NAMES, HubProcess, postgres_server
from member_process import (
    PROCESSES,
    TEAM,
    MemberProcess,
    difference,
    mine,
    one_process,
    run_command,
)

import hacrl
from hacrl.owners.signing import Signed
from hacrl.store.reader import RunReader

LONGEST = 5.0
"""Seconds between two kills, at most: a member must come to its next step in between."""
MODELS = dict(zip(NAMES, ("wren", "finch", "wren-2"), strict=True))


class QuickHub(HubProcess):
    """A hub in a process that has its modules loaded already, so that it is soon back."""

    quick: ForkServerProcess | None = None

    def start(self, *options: str, wait: bool = True) -> None:
        self.quick = PROCESSES.Process(
            target=run_command, args=(self.folder, self.arguments(*options)), daemon=True
        )
        self.quick.start()

    def kill(self) -> None:
        if self.quick is not None:
            self.quick.kill()
            self.quick.join()


def chain(member: MemberProcess, kind: str) -> dict[int, Signed]:
    """Step -> snapshot, or receipt, that a member has."""
    files = (member.run / "hub" / kind).glob("step-*.json")
    name = kind.removesuffix("s")
    return {int(f.stem.removeprefix("step-")): Signed.decode(name, f.read_bytes()) for f in files}


def wrong(team: list[MemberProcess], reference: RunReader) -> list[str]:
    """What is not as in the undisturbed run."""
    found = []
    snapshots = [chain(member, "snapshots") for member in team]
    if any(other != snapshots[0] for other in snapshots) or not snapshots[0]:
        found.append("the members' snapshots differ")
    for member in team:
        for step, receipt in chain(member, "receipts").items():
            listed = snapshots[0][step].content["batches"].get(member.name, {})
            if any(listed.get(part) != receipt.content[part] for part in ("outcomes", "texts")):
                found.append(f"{member.name}: the acknowledged batch of step {step + 1} is lost")
        if text := difference(member.name, member.reader(), reference):
            found.append(f"{member.name}: {text[:300]}")
    return found


def disturbed(hub: QuickHub, team: list[MemberProcess], kills: int, draw: random.Random) -> int:
    """Train with random kills until every member has finished; return the number of kills."""
    hub.start()
    for member in team:
        member.start()
    done, end = 0, time.monotonic() + 900
    while any(member.wait(0, expect=None) != 0 for member in team):
        assert time.monotonic() < end, [member.log[-500:] for member in team]
        for member in team:
            if member.wait(0, expect=None) not in (None, 0):
                raise AssertionError(f"{member.name}: {member.log[-800:]}")
        if done >= kills:
            time.sleep(0.2)
            continue
        time.sleep(draw.uniform(0.1, LONGEST))
        victim: QuickHub | MemberProcess = draw.choice([hub, *team])
        if isinstance(victim, MemberProcess) and victim.wait(0, expect=None) == 0:
            continue  # it has finished
        victim.kill()
        time.sleep(draw.uniform(0, 0.3))
        victim.start()
        done += 1
    return done


def storm(
    count: int, runs: int, steps: int, databases: list[str], seed: int, folder: Path
) -> list[str]:
    draw, findings, total = random.Random(seed), list[str](), 0
    reference: RunReader | None = None
    with ExitStack() as stack:
        new = None
        if "postgres" in databases:
            new = stack.enter_context(postgres_server(folder / "postgres"))
        for number in range(runs):
            kind = databases[number % len(databases)]
            place = folder / f"run-{number}"
            place.mkdir()
            database = new(f"hub{number}") if new and kind == "postgres" else None
            hub = QuickHub(place, database, **{**TEAM, "steps": steps})
            stack.callback(hub.kill)
            team = [MemberProcess(hub, name, mine(model)) for name, model in MODELS.items()]
            for member in team:
                stack.callback(member.kill)
            reference = reference or hacrl.train(one_process(team), folder / "undisturbed")
            left = -(-(count - total) // (runs - number))
            killed = disturbed(hub, team, left, draw)
            total += killed
            new_findings = [f"run {number + 1} ({kind}): {text}" for text in wrong(team, reference)]
            print(
                f"run {number + 1} ({kind}): {killed} kills, {len(new_findings)} findings",
                flush=True,
            )
            for text in new_findings:
                print(text, flush=True)
            findings += new_findings
            hub.kill()
    print(f"{total} kills of hubs and members in {runs} runs: {len(findings)} findings")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="kills in all")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    choices = ["sqlite", "postgres"]
    parser.add_argument("--databases", nargs="+", choices=choices, default=choices)
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        found = storm(args.count, args.runs, args.steps, args.databases, args.seed, folder)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
