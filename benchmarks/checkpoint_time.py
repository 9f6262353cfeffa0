"""Time to save a checkpoint of the Qwen3-1.7B shape, in this tree and an older one, in turn.

    python benchmarks/checkpoint_time.py --old OLD/src --repeats 5
    python benchmarks/checkpoint_time.py --old OLD/src --layers 4 --folder /dev/shm

A checkpoint holds the float32 master, both moments of AdamW and its step counts: 20.6 GB with all 28
layers. Every tensor has its own address, but all of them map one block of memory of the size of the
largest, so 1.3 GB of memory are enough. The saved checkpoint is removed after each measurement.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import json, math, mmap, os, resource, sys, time
from pathlib import Path
import torch
try:
    from hacrl.store.checkpoint import Checkpoint, Checkpoints
except ImportError:  # until 177e5d4
    from hacrl.checkpoint import Checkpoints, Snapshot as Checkpoint
shapes, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
memory = os.memfd_create("weights")
largest = 4 * max(map(math.prod, shapes.values()))
os.truncate(memory, largest)
block = torch.frombuffer(mmap.mmap(memory, largest), dtype=torch.float32)
block.copy_(torch.randn(1 << 20).repeat(block.numel() // (1 << 20) + 1)[: block.numel()])

def make(shape):
    view = mmap.mmap(memory, 4 * math.prod(shape))
    return torch.frombuffer(view, dtype=torch.float32).view(shape)

model = {name: make(shape) for name, shape in shapes.items()}
keys = "exp_avg", "exp_avg_sq"
optimizer = {f"{key}/{name}": make(shape) for key in keys for name, shape in shapes.items()}
optimizer |= {f"step/{name}": torch.tensor(3.0) for name in shapes}
os.sync()
usage = resource.getrusage(resource.RUSAGE_SELF)
begin, cpu = time.monotonic(), usage.ru_utime + usage.ru_stime
Checkpoints(folder / "agent", 1).save(Checkpoint(3, model, optimizer, {"skipped_updates": 0}))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.monotonic() - begin, usage.ru_utime + usage.ru_stime - cpu]))
"""


def shapes(layers: int) -> dict[str, list[int]]:
    """Name -> shape of the distinct weights of Qwen3-1.7B with this number of layers."""
    import torch
    from speed.shapes import SHAPES
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            type(SHAPES["Qwen3-1.7B"])(
                **SHAPES["Qwen3-1.7B"].to_dict()
                | {"num_hidden_layers": layers, "layer_types": None}
            )
        )
    return {name: list(p.shape) for name, p in model.named_parameters()}


def save(source: Path, wanted: str, folder: str | None) -> tuple[float, float]:
    """Elapsed and CPU seconds of one save with the code of a tree."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, wanted, place],
            stdout=subprocess.PIPE,
            check=True,
            env=os.environ | {"PYTHONPATH": str(source)},
        )
    elapsed, cpu = json.loads(done.stdout)
    return elapsed, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--old", type=Path, required=True, help="folder `src` of the older tree")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to save; default: the folder for temporary files")
    args = parser.parse_args()
    found = shapes(args.layers)
    weights = sum(math.prod(shape) for shape in found.values())
    print(f"{weights / 1e9:.2f}B weights, {12 * weights / 1e9:.1f} GB a checkpoint", flush=True)
    trees = {"old": args.old.resolve(), "new": ROOT / "src"}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for i in range(args.repeats):
        for name in list(trees)[:: -1 if i % 2 else 1]:
            times[name].append(save(trees[name], json.dumps(found), args.folder))
            elapsed, cpu = times[name][-1]
            print(f"{i + 1}, {name}: {elapsed:.2f} s, CPU {cpu:.2f} s", flush=True)
    for i, kind in enumerate(("elapsed", "CPU")):
        old, new = (sorted(t[i] for t in times[name]) for name in ("old", "new"))
        print(
            f"{kind}: old {statistics.median(old):.2f} s ({old[0]:.2f} to {old[-1]:.2f}), new "
            f"{statistics.median(new):.2f} s ({new[0]:.2f} to {new[-1]:.2f}), ratio "
            f"{statistics.median(new) / statistics.median(old):.3f}"
        )


if __name__ == "__main__":
    main()
