"""examples/minimal_loop.py computes the losses of `hacrl train`."""

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import hacrl
from hacrl.policy.policy import Policy

EXAMPLE = Path(__file__).parents[1] / "examples" / "minimal_loop.py"


def test_minimal_loop_has_the_losses_of_a_run(tmp_path: Path, monkeypatch: Any) -> None:
    spec = importlib.util.spec_from_file_location("minimal_loop", EXAMPLE)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "minimal_loop", example)  # dataclasses look it up
    spec.loader.exec_module(example)
    config = {
        "seed": example.SEED,
        "steps": 1,
        "prompts_per_step": example.PROMPTS,
        "samples_per_prompt": example.SAMPLES,
        "minibatch_samples": example.PROMPTS * example.SAMPLES,
        "max_prompt_tokens": 32,
        "max_response_tokens": example.MAX_TOKENS,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number", "workers": 1},
        "algorithm": {
            "name": "hacpo",
            "epsilon_low": example.EPSILON_LOW,
            "epsilon_high": example.EPSILON_HIGH,
            "alpha": example.ALPHA,
            "last_floor": example.FLOOR,
            "capability_window": example.WINDOW,
        },
        "evaluation": {"problems": 0},
        "runtime": {"device": "cpu", "threads": 1},
        "log": {"tensorboard": False},
        "agents": [
            {"name": name, "model": f"pocket:{name}", "learning_rate": example.LEARNING_RATE}
            for name in example.TEAM
        ],
    }
    losses: dict[str, list[float]] = defaultdict(list)
    update = Policy.update

    def record(self: Policy, *args: Any, **options: Any) -> Any:
        report = update(self, *args, **options)
        losses[self.agent.name].append(report.loss)
        return report

    monkeypatch.setattr(Policy, "update", record)
    hacrl.train(config, tmp_path / "run")
    (expected,) = example.train(steps=1)
    for name in example.TEAM:
        assert losses[name] == pytest.approx(expected[name], abs=1e-6)
        assert min(map(abs, losses[name])) > 1e-4  # not the trivial equality of zeros
