"""Where the time of a decode step goes: the kernels of the captured graph, by name.

    python benchmarks/decode_profile.py Qwen3-1.7B SmolLM2-135M --rows 1 8 64 256 512

Prints for each model and number of rows the microseconds of a step by the wall clock, and the launches
and microseconds per step of each kernel. The rest of the step is time in which no kernel runs. Needs a
GPU.
"""

import argparse
import time
from collections import Counter

import torch
from speed.shapes import SHAPES, make_policy, vocabulary_of
from speed.workload import make_trace
from torch.profiler import ProfilerActivity, profile

from hacrl.policy.attention import Switch
from hacrl.policy.policy import Policy
from hacrl.sampling.decode import STATE, GraphDecoder

STEPS = 50
LENGTH = 280  # more tokens than FUSE_AFTER, so that the sampled steps are compiled
POSITION = 300
"""Every row attends to this many tokens."""


def decoder_of(policy: Policy, shape: str) -> GraphDecoder:
    """The decoder of a sampler that has compiled and captured its steps."""
    trace = make_trace("short", 64, vocabulary_of(shape), length=LENGTH)
    for seed in range(2):
        policy.sampler.sample(trace.requests(seed), 1.0)
    return policy.sampler._chosen._decoder


def set_rows(decoder: GraphDecoder, rows: int) -> None:
    """Rows at POSITION that are done, so that no step advances them, with pages of their own."""
    decoder.state.zero_()
    decoder.state[STATE.index("position"), :rows] = POSITION
    decoder.state[STATE.index("done"), :rows] = 1
    pages = decoder.cache.pages.shape[2]
    decoder.table.copy_(torch.randint(1, pages, decoder.table.shape, dtype=torch.int32))


def run(decoder: GraphDecoder, rows: int, steps: int) -> float:
    """Seconds of this many steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        decoder.tick.zero_()
        decoder._step(rows)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def profiled(decoder: GraphDecoder, rows: int) -> tuple[float, Counter[str], Counter[str]]:
    """Microseconds of a step, and launches and microseconds of its kernels by name."""
    set_rows(decoder, rows)
    run(decoder, rows, 5)
    step = min(run(decoder, rows, STEPS) for _ in range(3)) / STEPS * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(decoder, rows, STEPS)
    launches: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        launches[event.key] += event.count
        spent[event.key] += event.self_device_time_total
    return step, launches, spent


def report(shape: str, rows: int, step: float, launches: Counter[str], spent: Counter[str]) -> str:
    kernels, busy = sum(launches.values()) / STEPS, sum(spent.values()) / STEPS
    lines = [
        f"\n{shape}, {rows} rows: step {step:,.0f} us, kernels {busy:,.0f} us in {kernels:.0f} launches",
        "| kernel | launches | us | us each |",
        "|---|---|---|---|",
    ]
    for name, total in spent.most_common(20):
        count = launches[name]
        row = f"| {name[:90]} | {count / STEPS:.1f} | {total / STEPS:,.1f} | {total / count:.1f} |"
        lines.append(row)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of a captured decode step.")
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256, 512])
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        policy = make_policy(shape, torch.device("cuda"), sampler_rows=max(arguments.rows))
        with torch.no_grad():
            decoder = decoder_of(policy, shape)
            with Switch(policy.model).on():
                for rows in arguments.rows:
                    print(report(shape, rows, *profiled(decoder, rows)), flush=True)
        del policy, decoder
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
