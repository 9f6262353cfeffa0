"""A suite of two arms with one agent and two steps, and the command that compares them."""

import sys
from pathlib import Path

import tomli_w

from hacrl.pocket import POCKET_CONFIG

SMALL = """steps=2 prompts_per_step=4 samples_per_prompt=4 minibatch_samples=8 max_response_tokens=16
evaluation.every=1 evaluation.problems=10 evaluation.samples=1 verifier.workers=0 checkpoint.save=false
log.tensorboard=false log.samples=false"""
SUITE = {
    "base": str(POCKET_CONFIG),
    "overrides": SMALL.split(),
    "seeds": [1, 2],
    "parallel": 2,
    "reference": "gspo",
    "arms": [{"name": "hacpo"}, {"name": "gspo", "overrides": ["algorithm.name=gspo"]}],
    "teams": [{"name": "team", "agents": ["wren"]}],
}
ALONE = {"seeds": [1], "arms": SUITE["arms"][1:], "overrides": [*SMALL.split(), "steps=1"]}


def command(folder: Path, *options: object) -> list[str]:
    suite, out = folder / "tiny.toml", folder / "out"
    parts = (sys.executable, "-m", "hacrl", "compare", suite, "--out", out, *options)
    return [str(part) for part in parts]


def write_suite(folder: Path, **changes: object) -> Path:
    (folder / "tiny.toml").write_text(tomli_w.dumps(SUITE | changes))
    return folder / "tiny.toml"
