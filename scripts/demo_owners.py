"""Three owners train together over a hub on PostgreSQL, and the same team trains in one process.

    python scripts/demo_owners.py [--steps 6] [--keep FOLDER] [--sqlite]

Every member is a process (`hacrl join`) with its own folder, key and config, and so is the hub. Prints
whether metrics, evaluations and weights of every member equal, byte for byte, those of the
team in one process with the same [trust] and publish settings. Exits with 1 if they differ.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "storms"))
from hub_process import HubProcess, postgres_server
from member_process import MINE, MemberProcess, difference, mine, one_process

import hacrl
from hacrl.owners.client import chain_head

CHARTER = {
    "prompts_per_step": 16,
    "samples_per_prompt": 8,
    "max_prompt_tokens": 32,
    "max_response_tokens": 48,
    "max_batch_bytes": 2**20,
    "levels": {"ant": "all", "bee": "successes", "cat": "all"},
    "reciprocity": False,
}
SETTINGS = {
    **MINE,
    "minibatch_samples": 128,
    "evaluation": {"every": 0, "problems": 100},
    "checkpoint": {"every": 4, "keep": 1},
}
MODELS = {"ant": "wren", "bee": "finch", "cat": "heron"}


def demo(folder: Path, steps: int, database: str | None) -> dict[str, str]:
    """Train both; return by member where its run differs from the one in one process."""
    with ExitStack() as stack:
        hub = stack.enter_context(HubProcess(folder, database, steps=steps, **CHARTER))
        members = [MemberProcess(hub, n, mine(m, **SETTINGS)) for n, m in MODELS.items()]
        for member in members:
            stack.callback(member.kill)
        began = time.monotonic()
        for member in members:
            member.start()
        for member in members:
            member.wait()
            print(f"{member.name}: {chain_head(member.run / 'hub')}")
        print(f"three owners: {time.monotonic() - began:.0f} s, hub {hub.url}, data in {folder}")
    began = time.monotonic()
    reference = hacrl.train(one_process(members), folder / "one-process")
    print(f"one process: {time.monotonic() - began:.0f} s")
    return {m.name: difference(m.name, m.reader(), reference) for m in members}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="folder for all files (default: a temporary one)")
    parser.add_argument("--sqlite", action="store_true", help="no PostgreSQL")
    args = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "team").mkdir(parents=True)
        database = None
        if not args.sqlite:
            database = stack.enter_context(postgres_server(folder / "postgres"))("hub")
        found = demo(folder / "team", args.steps, database)
    for name, text in found.items():
        print(f"{name}: metrics, evaluations and weights {'differ: ' + text if text else 'equal'}")
    print(f"{'differ' if any(found.values()) else 'equal, byte for byte'}; "
          f"{time.monotonic() - began:.0f} s in all")  # fmt: skip
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
