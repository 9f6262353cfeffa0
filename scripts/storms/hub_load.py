"""Load on a hub: many members publish a large step at once, and all read all of it.

    python scripts/storms/hub_load.py --members 16 --rows 1024 --bytes 4096 [--database postgresql://...]

Prints the seconds until all batches are acknowledged and the step is closed, the MB/s at which all
members then receive all batches, and the memory of the hub; then the seconds in which one learner judges
the texts of all its peers (verifier `number`), and the same step through the folder pool of a run in one
process. Texts are random words, so they compress like text. The members are threads of this process and
share its cores with the hub.
"""

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from hub_process import HubProcess, postgres_server, row

from hacrl.owners.batch import Batch
from hacrl.owners.client import HubClient
from hacrl.owners.connection import Sender
from hacrl.store.pool import Pool
from hacrl.tasks import TaskConfig, make_task
from hacrl.types import Trajectory
from hacrl.verify import VerifierPool
from hacrl.verify.settings import VerifierConfig

Batches = dict[str, list[Trajectory]]  # by member
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def text(draw: random.Random, size: int) -> str:
    return " ".join(draw.choices(WORDS, k=size // 4))[:size]


def deliver(client: HubClient) -> tuple[int, int]:
    """Read and verify a step; return its bytes before and after compression."""
    header = client.snapshot(0)
    assert header is not None
    plain = 0
    for listed in client.envelopes(0):
        for digest in (listed.envelope.outcomes, listed.envelope.texts):
            plain += len(client.part(0, digest))
    return plain, len(header.content["batches"])


def load(members: int, rows: int, size: int, database: str | None) -> dict[str, float]:
    names = tuple(f"member-{n:02d}" for n in range(members))
    draw = random.Random(0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        limits = {"prompts_per_step": rows, "samples_per_prompt": 1}
        limits["max_batch_bytes"] = 2 * rows * (size + 1000)
        hub = stack.enter_context(HubProcess(folder, database, names=names, **limits))
        threads = stack.enter_context(ThreadPoolExecutor(members))
        clients = [hub.client(name, patience=120.0) for name in names]
        bodies, batches = [], {}
        for client in clients:
            made = [row(client.name, 0, f"q{n:05d}", 0, text(draw, size), 1.0) for n in range(rows)]
            batches[client.name] = made
            batch = Batch.build(client.key, hub.team.id, client.name, 0, made, "all", None)
            bodies.append(batch.encode())
        began = time.perf_counter()
        list(threads.map(put, clients, bodies))
        acknowledged = time.perf_counter() - began
        assert clients[0].snapshot(0) is not None
        closed = time.perf_counter() - began
        began = time.perf_counter()
        plain = sum(found[0] for found in threads.map(deliver, clients))
        seconds = time.perf_counter() - began
        memory = hub.metrics()["hacrl_hub_memory_bytes"] / 1e6
        hub.kill()
        return {
            "sent_mb": sum(map(len, bodies)) / 1e6,
            "acknowledged_s": acknowledged,
            "closed_s": closed,
            "delivered_mb": plain / 1e6,
            "delivery_s": seconds,
            "delivery_mb_per_s": plain / 1e6 / seconds,
            "hub_memory_mb": memory,
            "judging_s": judging(batches),
            **folder_pool(folder / "pool", batches),
        }


def judging(batches: Batches) -> float:
    """Seconds in which a learner judges the texts of its peers."""
    (problem,) = make_task(TaskConfig(kind="arithmetic"), 0, Path()).batch(0, 1)
    texts = [(t.text, problem) for name in list(batches)[1:] for t in batches[name]]
    with VerifierPool(VerifierConfig(kind="number")) as verifier:
        verifier.judge_all(texts[:1])  # starts the workers
        began = time.perf_counter()
        verifier.judge_all(texts)
        return time.perf_counter() - began


def folder_pool(folder: Path, batches: Batches) -> dict[str, float]:
    """The same step through a folder: publish and close, then one learner reads all of it."""
    pool = Pool(folder)
    began = time.perf_counter()
    for name, rows in batches.items():
        pool.publish(0, name, rows)
    pool.close(0, list(batches))
    closed = time.perf_counter()
    pool.snapshot(0)
    return {
        "folder_closed_s": closed - began,
        "folder_read_s": time.perf_counter() - closed,
    }


def put(client: HubClient, body: bytes) -> None:
    team = client.team
    sender = Sender(team.id, team.charter.hub, client.name, client.key)
    client.connection.send("PUT", "/v1/steps/0/batch", body, sender)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--database", help="URL, or postgres to start a server (default: SQLite)")
    args = parser.parse_args()
    with ExitStack() as stack:
        database = args.database
        if database == "postgres":
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            database = stack.enter_context(postgres_server(place))("load")
        for name, value in load(args.members, args.rows, args.bytes, database).items():
            print(f"{name:18} {value:10.2f}")


if __name__ == "__main__":
    main()
