"""`hacrl view` over a large run: time of the first view, of the index and of filtered lists, and memory.

    python scripts/storms/view_load.py --run /tmp/large

writes a run of 1,000 steps and 4 agents with 1,024,000 training samples of 256,000 replies through the
store's own encoders, if the folder does not exist, and measures a server over it as a process. Times are
wall-clock; the CPU seconds of the server stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rows import make_row

from hacrl.config import parse_config
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.types import Finish, Sampling, Status, Trajectory, Verdict

AGENTS = ("ant", "bee", "cow", "dog")
PROBLEMS, SAMPLES = 8, 8
WORDS = [
    "the",
    "answer",
    "is",
    "so",
    "then",
    "add",
    "carry",
    "ten",
    "minus",
    "times",
    "equals",
    "first",
    "second",
    "sum",
    "check",
    "again",
]


def config(steps: int, folder: Path) -> Any:
    agents = [{"name": name, "model": "pocket:wren", "learning_rate": 1e-4} for name in AGENTS]
    tables = {"task": {"kind": "arithmetic"}, "verifier": {"kind": "number"}, "agents": agents}
    sizes = {"steps": steps, "prompts_per_step": PROBLEMS, "samples_per_prompt": SAMPLES}
    return parse_config({**sizes, "algorithm": {"name": "hacpo"}, **tables}, "large", folder)


def trajectory(step: int, agent: str, problem: int, index: int, noise: random.Random) -> Trajectory:
    right = noise.random() < 0.2 + 0.6 * step / 1000
    words = noise.choices(WORDS, k=40)
    text = f"{' '.join(words)} {noise.randrange(1000)} so {noise.randrange(10**6)}"
    return make_row(
        agent,
        f"add-{step}-{problem}",
        index,
        step,
        text,
        finish=Finish.STOP if noise.random() < 0.95 else Finish.LENGTH,
        mean_logprob=-noise.random(),
        num_tokens=len(words) + 8,
        verdict=Verdict(float(right), Status.OK if right else Status.WRONG, words[0]),
        sampling=Sampling(1.0, 64),
        tokenizer="sha256:0",
    )


def sample_rows(rows: list[Trajectory], noise: random.Random) -> Iterator[dict[str, Any]]:
    for t in rows:
        used = noise.random() < 0.6
        ratio, advantage = (
            noise.uniform(0.6, 1.2),
            noise.gauss(0, 1) if noise.random() < 0.8 else 0.0,
        )
        yield {
            **{"problem": t.problem_id, "source": t.agent, "index": t.index},
            **{"advantage": advantage, "weight": 0.9, "ratio": ratio if advantage else None},
            **{"used": used if advantage else None, "update": 1, "floor": 0.8},
        }


def metrics_row(step: int, agent: str, noise: random.Random) -> dict[str, Any]:
    """As many values as a row of a real team."""
    peers = [name for name in AGENTS if name != agent]
    names = ("loss", "grad_norm", "kl", "own/ratio", "own/clipped", "peers/used", "reply_tokens")
    sources = (
        "ratio",
        "peers/used",
        "peers/effective",
        "weight",
        "samples/kept",
        "samples/dropped",
    )
    return {
        **{"kind": "train", "step": step, "agent": agent, "rollouts": PROBLEMS * SAMPLES},
        "reward": 0.2 + 0.6 * step / 1000 + noise.gauss(0, 0.05),
        **{name: noise.random() for name in names},
        **{f"{name}/{peer}": noise.random() for name in sources for peer in peers},
        **{f"samples/drop/{i}": 0.0 for i in range(14)},
    }


def write_run(path: Path, steps: int) -> None:
    """Write the run. Files are not synced: a power failure is not part of the measurement."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
    noise = random.Random(0)
    run = RunDirectory.create(path, config(steps, path.parent))
    pool = Pool(run.pool_path)
    for step in range(steps):
        rows = []
        for agent in AGENTS:
            pairs = [(p, i) for p in range(PROBLEMS) for i in range(SAMPLES)]
            batch = [trajectory(step, agent, p, i, noise) for p, i in pairs]
            pool.publish(step, agent, batch)
            rows += batch
        pool.close(step, AGENTS)
        for agent in AGENTS:
            run.write_samples(agent, step, sample_rows(rows, noise))
        run.add_metrics([metrics_row(step, agent, noise) for agent in AGENTS])
        phases = ("sample", "verify", "score", "publish", "samples", "update")
        for agent in AGENTS:
            run.add_times({"step": step, "agent": agent, **{p: noise.random() for p in phases}})


class Server:
    """`hacrl view RUN` as a process."""

    def __init__(self, run: Path, cache: str) -> None:
        command = [sys.executable, "-m", "hacrl", "view", str(run), "--port", "0", "--no-browser"]
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[^/]*", line)
        assert found, line
        self.url, self.id = found[0], run.name

    def get(self, name: str, **query: object) -> tuple[dict[str, Any], float]:
        """The answer of /api/NAME and its seconds."""
        address = f"{self.url}/api/{name}?{urlencode({'id': self.id, **query})}"
        began = time.perf_counter()
        with urllib.request.urlopen(address, timeout=120) as answer:
            value = json.loads(answer.read())
        return value, time.perf_counter() - began

    def memory(self) -> float:
        """Highest resident megabytes so far."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s*(\d+)", text)
        return int(found[1]) / 1024 if found else float("nan")

    def cpu(self) -> float:
        """User and system seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


QUERIES: dict[str, dict[str, object]] = {
    "everything": {},
    "author, reward, used": {
        "author": "bee",
        "reward": "positive",
        "learner": "ant",
        "used": "used",
    },
    "one step": {"step": 500},
    "two words": {"q": "carry 123"},
    "a word and used": {"q": "check", "used": "clipped", "learner": "dog", "finish": "length"},
    "last page": {"offset": 200_000},
}


def measure(run: Path, cache: str, index: bool) -> dict[str, Any]:
    """Seconds and CPU seconds of a new server: start, first view, index, filtered lists."""
    server = Server(run, cache)
    found: dict[str, Any] = {
        "start_s": time.perf_counter() - server.started,
        "start_cpu_s": server.cpu(),
    }
    try:
        for name in ("run", "run again", "rollouts", "teach"):
            before = server.cpu()
            _, seconds = server.get(name.split()[0])
            found[name] = {"s": seconds, "cpu_s": server.cpu() - before}
        while index:
            progress = server.get("rollouts")[0]["index"]
            if progress["complete"]:
                found["index"] = {"s": time.perf_counter() - server.started, "cpu_s": server.cpu()}
                break
            time.sleep(2)
        for name, query in QUERIES.items():
            before = server.cpu()
            answer, seconds = server.get("rollouts", **query)
            spent = server.cpu() - before
            found[f"list: {name}"] = {"s": seconds, "cpu_s": spent, "total": answer["total"]}
        found["memory_mb"] = server.memory()
    finally:
        server.process.terminate()
        server.process.wait(20)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/large-run"))
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    if not options.run.exists():
        began = time.process_time()
        write_run(options.run, options.steps)
        print(f"written in {time.process_time() - began:.0f} CPU seconds", file=sys.stderr)
    with tempfile.TemporaryDirectory() as cache:
        results = {
            "without an index": measure(options.run, cache, index=True),
            "with its index": measure(options.run, cache, index=True),
        }
    print(json.dumps(results, indent=1, default=lambda x: round(x, 3)))


if __name__ == "__main__":
    main()
