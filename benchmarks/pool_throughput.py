"""Time to publish one step's batches, close the step and read its snapshot (replies of 4 KB).

    python benchmarks/pool_throughput.py                                         # 8 agents x 2,048
    python benchmarks/pool_throughput.py --agents 64 --prompts 128 --samples 8   # one large step

Publishing and reading are work of each agent on its own core, at the same time as the others. A step
waits for one publish, the close and one snapshot.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hacrl.store.pool import Pool
from hacrl.types import Finish, Sampling, Status, Trajectory, Turn, Verdict

TEXT = r"we have that the sum of the first n terms is equal to \frac{1}{2} which gives x = 3^2 é"
WORDS = TEXT.split(" ")


def trajectories(
    agent: str, prompts: int, samples: int, length: int, draw: random.Random
) -> list[Trajectory]:
    return [
        Trajectory(
            problem_id=f"problem-{p:06d}",
            task="math",
            agent=agent,
            index=i,
            step=0,
            policy_version=0,
            turns=(Turn("assistant", " ".join(draw.choices(WORDS, k=length // 4))[:length], True),),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=4096, help="length of a reply")
    args = parser.parse_args()
    draw, names = random.Random(0), [f"agent-{a:02d}" for a in range(args.agents)]
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start, start_cpu = time.perf_counter(), time.process_time()
        result = work()
        wall[name] = wall.get(name, 0.0) + time.perf_counter() - start
        cpu[name] = cpu.get(name, 0.0) + time.process_time() - start_cpu
        return result

    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder))
        for name in names:
            rows = trajectories(name, args.prompts, args.samples, args.bytes, draw)
            timed("publish", lambda name=name, rows=rows: pool.publish(0, name, rows))
        timed("close", lambda: pool.close(0, names))
        snapshot = timed("snapshot", lambda: pool.snapshot(0))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.gz"))
    count = args.agents * args.prompts * args.samples
    assert sum(len(g.trajectories) for g in snapshot.groups) == count
    print(
        f"{count:,} trajectories of {args.bytes:,} bytes, {args.agents} agents, {size / 1e6:.0f} MB"
    )
    for name in ("publish", "close", "snapshot"):
        print(f"{name:9s}{wall[name]:7.2f} s  {cpu[name]:7.2f} s of the CPU")
    waits = wall["publish"] / args.agents + wall["close"] + wall["snapshot"]
    print(f"a step waits {waits:.2f} s where every agent has a core")


if __name__ == "__main__":
    main()
