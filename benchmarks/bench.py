"""Rollouts, scoring, updates and steps, measured side by side with vLLM, `generate`, TRL and the floor.

    make bench                                                     # the CPU part, a few minutes
    python benchmarks/bench.py gpu --parts rollout,score,update,step --out gpu.json
    python benchmarks/bench.py gpu --parts rollout --beside 2     # two agents at the same time
    python benchmarks/bench.py gpu --parts vllm --price 3.5 --out vllm.json
    python benchmarks/bench.py gpu --parts joint --out joint.json
    python benchmarks/bench.py gpu --parts pair --out pair.json [--phases rollout-a,rollout-b]
    python benchmarks/bench.py cpu --tiny                          # does everything work?

Models have random weights of known shapes; lengths and rewards come from workload.json. If a part
fails, its error is printed, the others continue, and the exit code is 1. benchmarks/README.md explains
each number and holds the figures.
"""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from speed.alone import StepCase, step
from speed.beside import beside
from speed.floor import measure_ceilings
from speed.measure import Log, free
from speed.pocket import pocket
from speed.together import PHASES, PairCase, joint, pair
from speed.vllm_rollout import EngineFailed, vllm
from speed.work import Case, Setting, rollout, score_and_update


@dataclass(frozen=True)
class Cases:
    """What each part measures."""

    rollout: list[Case]
    rollout_long: list[Case]
    work: Case
    """For score and update."""
    step: StepCase
    joint: PairCase
    pair: PairCase


GPU = Cases(
    rollout=[
        Case("Qwen3-1.7B", prompts=32, rows=256, length=256),
        Case("Qwen3-1.7B", prompts=64, rows=256),
        Case("Qwen3-1.7B", prompts=128, rows=256, generate=False),
        Case("SmolLM2-135M", prompts=64, rows=512, length=256),
        Case("SmolLM2-135M", prompts=128, rows=512),
    ],
    rollout_long=[Case("Qwen3-1.7B", prompts=128, rows=512, variant="long", generate=False)],
    work=Case("Qwen3-1.7B", prompts=16, rows=128, variant="long"),
    step=StepCase("Qwen3-1.7B", prompts=32, updates=2, rows=256, per_device=16),
    joint=PairCase(
        ("Qwen3-0.6B", "Qwen3-1.7B"),
        prompts=128,
        minibatch=512,
        rows=512,
        microbatch=(40960, 24576),  # large: the host is slower than the GPU
    ),
    pair=PairCase(("Qwen3-1.7B", "Qwen3-4B"), prompts=128, minibatch=512, rows=512, variant="long"),
)
CPU = Cases(
    rollout=[
        Case("small-4M", prompts=8, rows=64, length=64),
        Case("small-4M", prompts=16, rows=64, scale=0.25),
    ],
    rollout_long=[Case("small-4M", prompts=8, rows=64, variant="long", scale=0.1)],
    work=Case("small-4M", prompts=4, rows=64, variant="long", scale=0.25),
    step=StepCase("small-4M", prompts=8, updates=2, rows=64, per_device=16, scale=0.25),
    joint=PairCase(("small-1M", "small-4M"), prompts=8, minibatch=32, rows=64, scale=0.25),
    pair=PairCase(
        ("small-1M", "small-4M"), prompts=8, minibatch=32, rows=64, variant="long", scale=0.1
    ),
)
TINY = Cases(
    rollout=[
        Case("tiny-a", prompts=2, rows=16, length=8),
        Case("tiny-b", prompts=4, rows=16, scale=0.05),
    ],
    rollout_long=[Case("tiny-a", prompts=2, rows=16, variant="long", scale=0.02)],
    work=Case("tiny-a", prompts=4, rows=16, scale=0.05),
    step=StepCase("tiny-a", prompts=4, updates=2, rows=16, per_device=8, scale=0.05),
    joint=PairCase(("tiny-a", "tiny-b"), prompts=4, minibatch=16, rows=32, scale=0.05),
    pair=PairCase(
        ("tiny-a", "tiny-b"), prompts=4, minibatch=16, rows=32, variant="long", scale=0.02
    ),
)
DEFAULT_PARTS = {
    "gpu": "rollout,score,update,step",
    "cpu": "pocket,rollout,score,update,step,joint",
}


def main() -> int:
    arguments = read_arguments()
    if arguments.trl_site:
        sys.path.append(arguments.trl_site)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module="hacrl")
    if arguments.processor_time:
        time.perf_counter = time.process_time  # every clock of the run, hacrl's and TRL's too
    on_gpu = arguments.device == "gpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(arguments.threads)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    log = Log(arguments.out, arguments.price)
    ceilings = measure_ceilings(device, dtype)
    log.facts |= {
        "bytes_per_s": ceilings.bytes_per_s,
        "operations_per_s": ceilings.operations_per_s,
        "trl": trl_version() if arguments.trl else None,
        "price_per_hour": arguments.price,
        "command": " ".join(["python", *sys.argv]),
    }
    log.say(
        f"{log.facts['device']}: copies {ceilings.bytes_per_s / 1e9:,.0f} GB/s, multiplies "
        f"{ceilings.operations_per_s / 1e12:,.2f} Tflop/s in {str(dtype).removeprefix('torch.')}"
    )
    fields = agent_fields(arguments.set)
    setting = Setting(device, ceilings, log, arguments.repeats, fields, arguments.generate)
    for name, work in parts(arguments, setting).items():
        try:
            work()
        except EngineFailed as error:
            log.failed.append(name)
            log.say(f"{name}: {error}")
        except Exception:
            log.failed.append(name)
            log.say(f"{name} failed:\n{traceback.format_exc()}")
        free(device)
    log.write()
    print("\n" + log.table(), flush=True)
    if log.failed:
        print(f"failed: {', '.join(log.failed)}", flush=True)
    return 1 if log.failed else 0


def parts(arguments: argparse.Namespace, setting: Setting) -> dict[str, Callable[[], None]]:
    """What to run, in order."""
    cases = TINY if arguments.tiny else GPU if arguments.device == "gpu" else CPU
    if arguments.few:
        joint_case = replace(cases.joint, prompts=64, minibatch=256, shares=(0.35,))
        cases = replace(cases, rollout=cases.rollout[1::3], joint=joint_case)
    if arguments.shape:
        chosen = [case for case in cases.rollout if case.shape == arguments.shape]
        cases = replace(cases, rollout=chosen)
    wanted = arguments.parts.split(",")
    if arguments.processor_time and "vllm" in wanted:
        raise SystemExit("--processor-time: vLLM is measured by the wall clock only")
    both = {"score", "update"} & set(wanted)
    step_case = replace(cases.step, per_device=arguments.trl_batch or cases.step.per_device)
    works: dict[str, Callable[[], None]] = {
        "rollout": lambda: (
            rollout(setting, cases.rollout)
            if arguments.beside == 1
            else beside(setting, cases.rollout, arguments.beside)
        ),
        "rollout-long": lambda: rollout(setting, cases.rollout_long),
        "vllm": lambda: vllm(setting, cases.rollout),
        "score": lambda: score_and_update(setting, cases.work, both),
        "update": lambda: score_and_update(setting, cases.work, both),
        "step": lambda: step(setting, step_case, with_trl=setting.log.facts["trl"] is not None),
        "joint": lambda: joint(setting, cases.joint),
        "pair": lambda: pair(
            setting,
            cases.pair,
            phases=arguments.phases.split(","),
            limit_s=arguments.limit_s,
            share=arguments.prunable,
        ),
        "pocket": lambda: pocket(setting, 2 if arguments.tiny else 5),
    }
    if unknown := set(wanted) - set(works):
        raise SystemExit(f"unknown parts {sorted(unknown)}; there are {', '.join(works)}")
    if len(both) == 2:
        wanted.remove("update")  # done along with score, on the same model
    return {name: works[name] for name in wanted}


def agent_fields(pairs: list[str]) -> dict[str, Any]:
    """microbatch_tokens=32768, gradient_checkpointing=true, dtype=float32 ..."""
    fields: dict[str, Any] = {}
    for pair_ in pairs:
        name, value = pair_.split("=", 1)
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def trl_version() -> str | None:
    try:
        import trl
    except ImportError as error:
        print(f"TRL cannot be imported ({error}); steps are measured without it", flush=True)
        return None
    return trl.__version__


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=["cpu", "gpu"])
    parser.add_argument("--parts", default="", help="comma-separated; see DEFAULT_PARTS")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help="smallest shapes: a test of the parts")
    parser.add_argument("--few", action="store_true", help="fewer rollouts, a smaller joint case")
    parser.add_argument("--shape", help="`rollout` and `vllm`: only the cases of this shape")
    parser.add_argument("--beside", type=int, default=1, help="`rollout`: agents at the same time")
    parser.add_argument("--price", type=float, help="of an hour of the device, in any currency")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, after a warm-up")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="on a CPU that others use too: count this process's time on it, not the wall clock's",
    )
    parser.add_argument(
        "--no-generate", dest="generate", action="store_false", help="leave `generate` out"
    )
    parser.add_argument("--no-trl", dest="trl", action="store_false", help="leave TRL out")
    parser.add_argument("--trl-site", help="a folder of packages with TRL, put last on the path")
    parser.add_argument("--trl-batch", type=int, help="TRL's per-device batch")
    parser.add_argument("--phases", default=",".join(PHASES), help="of `pair`")
    parser.add_argument("--limit-s", type=float, default=1e9, help="`pair`: no new phase after it")
    parser.add_argument("--prunable", type=float, default=0.0, help="`pair`: share of peers' rows")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of every agent's config"
    )
    arguments = parser.parse_args()
    arguments.parts = arguments.parts or DEFAULT_PARTS[arguments.device]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
