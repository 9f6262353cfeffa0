"""How fast the pool is: trajectories of 4 KB published, a step closed, its cut gathered.

    python benchmarks/pool_throughput.py                                # 100,000, of 8 agents
    python benchmarks/pool_throughput.py --agents 64 --prompts 128 --samples 8   # one large step
    python benchmarks/pool_throughput.py ... --ray                      # through the pool's actor

`encode` and `gather` are each agent's own work, on its own cores, at the same time as the others';
`store` is the database's, one agent after the other. So what a step waits for, where every agent has
a core, is one agent's encode, all stores, the close and one gather. One line each is printed, and
that sum beside the sum of everything done in turn on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hacrl.store.pool.sql import SqlPool
from hacrl.store.pool.text import Bodies, pack
from hacrl.types import Finish, Sampling, Status, Trajectory, Turn, Verdict

SENTENCE = (
    r"we have that the sum of the first n terms is equal to \frac{1}{2} which gives so let us "
    r"compute x = 3^2 + y and then therefore é"
)


def reply(length: int, draw: random.Random) -> str:
    words, text = SENTENCE.split(), ""
    while len(text) < length:
        text += draw.choice(words) + (" " if draw.random() < 0.95 else ".\n")
    return text[:length]


def trajectories(agent: str, prompts: int, samples: int, text: str) -> list[Trajectory]:
    return [
        Trajectory(
            problem_id=f"problem-{p:06d}",
            task="math",
            agent=agent,
            index=i,
            step=0,
            policy_version=0,
            turns=(Turn("assistant", text, True),),
            finish=Finish.STOP,
            mean_logprob=-0.4321 - i / 7,
            num_tokens=1000,
            verdict=Verdict(float(i % 2), Status.OK if i % 2 else Status.WRONG, "42"),
            verifier="math/1",
            sampling=Sampling(1.0, 4096),
            shareable=True,
            tokenizer="sha256:" + "0" * 64,
        )
        for p in range(prompts)
        for i in range(samples)
    ]


def timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    """Adds to `name` the seconds that passed, and to `name cpu` those of this process's work: on a
    machine that does other things as well, the two lie apart."""
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    seconds[f"{name} cpu"] = seconds.get(f"{name} cpu", 0.0) + time.process_time() - cpu
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1250)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--bytes", type=int, default=4096, help="length of a reply")
    parser.add_argument("--ray", action="store_true", help="through the actor of a cluster's pool")
    args = parser.parse_args()
    text = reply(args.bytes, random.Random(0))
    names = [f"agent-{a:02d}" for a in range(args.agents)]
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        pool: Any
        if args.ray:
            import ray

            from hacrl.training.ray_pool import PoolKeeper, RayPool

            ray.init(address="local", include_dashboard=False, log_to_driver=False)
            keeper = ray.remote(PoolKeeper).remote("sqlite:///pool.db", folder)
            pool = RayPool(keeper)

            def put(bodies: Bodies) -> None:
                ray.get(keeper.put.remote(pack(bodies.items())))

        else:
            pool = SqlPool("sqlite:///pool.db", Path(folder))
            put = pool.put
        encoder = pool.text
        for name in names:
            rows = trajectories(name, args.prompts, args.samples, text)
            bodies = timed(seconds, "encode", lambda rows=rows: encoder.encode(rows))
            timed(seconds, "store", lambda bodies=bodies: put(bodies))
            pool.arrive(0, name)
        timed(seconds, "close", lambda: pool.close(0, names))
        cut = timed(seconds, "gather", lambda: pool.gather(0))
        size = (Path(folder) / "pool.db").stat().st_size
        pool.dispose()
    count = args.agents * args.prompts * args.samples
    assert sum(len(g.trajectories) for g in cut.groups) == count
    print(f"{count:,} trajectories of {args.bytes:,} bytes, {args.agents} agents")
    for name in ("encode", "store", "close", "gather"):
        spent, cpu = seconds[name], seconds[f"{name} cpu"]
        print(f"{name:8s}{spent:7.2f} s  {count / spent:11,.0f} rows/s  {cpu:7.2f} s of the cpu")
    whole = sum(v for k, v in seconds.items() if " " not in k)
    waits = whole - seconds["encode"] * (1 - 1 / args.agents)
    print(f"a step waits {waits:.2f} s where every agent has a core")
    print(f"all in turn  {whole:.2f} s, {count / whole:,.0f} rows/s; pool.db {size / 1e6:,.0f} MB")
    print(json.dumps({**seconds, "waits": waits, "whole": whole, "rows": count}))


if __name__ == "__main__":
    main()
