"""Makes workload.json: lengths and rewards that the benchmarks run on.

    python benchmarks/make_workload.py

Two variants of 128 prompts with 16 replies each (8 for each of two agents): `long`, replies of mean
700 tokens and at most 4,096, and `short`, mean 180 and at most 512. Reply lengths are log-normal;
half of their variance (in the logarithm) belongs to the prompt: a hard problem has long replies.
Rewards are 0 or 1 by a difficulty of the prompt, drawn again until each agent's eight hold both: no
row then has advantage 0, so the share of rows that an update can leave out is what a benchmark sets.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

SEED = 20260
PROMPTS = 128
GROUP = 8
AGENTS = 2
VARIANTS = {"long": (700, 4096, 0.9), "short": (180, 512, 0.6)}
"""Mean and largest reply length, and the standard deviation of its logarithm."""
PROMPT_LENGTHS = (100, 300, 0.4)
FILE = Path(__file__).with_name("workload.json")


def capped(normals: Sequence[float], centre: float, spread: float, cap: int) -> list[int]:
    return [max(1, min(cap, round(math.exp(centre + spread * z)))) for z in normals]


def lengths(normals: Sequence[float], mean: int, cap: int, spread: float) -> list[int]:
    """exp(centre + spread * z), truncated at the cap, with the centre that gives this mean."""
    low, high = 0.0, math.log(cap)
    for _ in range(60):
        centre = (low + high) / 2
        found = sum(capped(normals, centre, spread, cap)) / len(normals)
        low, high = (centre, high) if found < mean else (low, centre)
    return capped(normals, high, spread, cap)


def variant(name: str) -> dict[str, list]:
    draw = random.Random(f"{SEED}/{name}")
    rows = GROUP * AGENTS
    prompt_normals = [draw.gauss(0, 1) for _ in range(PROMPTS)]
    hardness = [draw.gauss(0, 1) for _ in range(PROMPTS)]
    normals = [math.sqrt(0.5) * (h + draw.gauss(0, 1)) for h in hardness for _ in range(rows)]
    flat = lengths(normals, *VARIANTS[name])
    rewards = []
    for _ in range(PROMPTS):
        chance = draw.betavariate(1, 1)
        row: list[int] = []
        while len(row) < rows:
            group = [int(draw.random() < chance) for _ in range(GROUP)]
            if 0 < sum(group) < GROUP:
                row += group
        rewards.append(row)
    return {
        "prompt_tokens": lengths(prompt_normals, *PROMPT_LENGTHS),
        "reply_tokens": [flat[i * rows : (i + 1) * rows] for i in range(PROMPTS)],
        "rewards": rewards,
    }


def content() -> str:
    variants = {name: variant(name) for name in VARIANTS}
    lines = []
    for name, columns in variants.items():
        prompts = json.dumps(columns["prompt_tokens"])
        replies = ",\n      ".join(json.dumps(row) for row in columns["reply_tokens"])
        rewards = ",\n      ".join(json.dumps(row) for row in columns["rewards"])
        lines.append(
            f'  "{name}": {{\n    "prompt_tokens": {prompts},\n'
            f'    "reply_tokens": [\n      {replies}\n    ],\n'
            f'    "rewards": [\n      {rewards}\n    ]\n  }}'
        )
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(content())
    for name, columns in json.loads(content()).items():
        flat = [n for row in columns["reply_tokens"] for n in row]
        print(f"{name}: mean {sum(flat) / len(flat):.1f}, longest {max(flat)}, rows {len(flat)}")
