"""The pocket team on a CPU: the same five steps with hacrl's sampler and with `generate`."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hacrl.config import load_config
from hacrl.policy.policy import Policy
from hacrl.runs import start
from hacrl.sampling.base import Reply, Request
from speed.generate import GenerateSampler
from speed.measure import Measurement
from speed.work import Setting

CONFIG = Path(__file__).parents[2] / "configs" / "pocket.toml"


class Watched:
    """A sampler and the seconds spent in it, and what plain `generate` takes for the same requests
    at the same weights."""

    def __init__(self, policy: Policy) -> None:
        self.sampler = policy.sampler
        self.seconds = 0.0
        self.tokens = 0
        self.generate = GenerateSampler(policy)
        self.generate_seconds = 0.0
        """With torch's own generator, as a script would sample."""

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        begin = time.perf_counter()
        replies = self.sampler.sample(requests, temperature)
        end = time.perf_counter()
        self.generate.write(requests, own_noise=False)
        self.generate_seconds += time.perf_counter() - end
        self.seconds += end - begin
        self.tokens += sum(len(r.token_ids) for r in replies)
        return replies

    def weights_changed(self) -> None:
        self.sampler.weights_changed()


@contextmanager
def _samplers(make: Any) -> Iterator[list[Any]]:
    """Policies made inside get `make(policy)` as their sampler; the samplers made so far."""
    made: list[Any] = []
    original = Policy.__init__

    def init(self: Policy, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.sampler = make(self)
        made.append(self.sampler)

    with patch.object(Policy, "__init__", init):
        yield made


def pocket(setting: Setting, steps: int = 5) -> None:
    """Rollouts of five training steps, and whether all their metrics are equal to 1e-5."""
    changes = [
        f"steps={steps}",
        "evaluation.problems=0",
        "checkpoint.save=false",
        "log.tensorboard=false",
    ]
    config = load_config(CONFIG, changes)
    with tempfile.TemporaryDirectory() as folder:
        setting.log.say(f"pocket: {steps} steps with hacrl's sampler")
        with _samplers(Watched) as ours:
            mine = start(config, Path(folder) / "ours")
        setting.log.say(f"pocket: {steps} steps with generate and the same noise")
        with _samplers(GenerateSampler) as theirs:
            other = start(config, Path(folder) / "generate")
        difference, compared = largest_difference(
            list(mine.metric_rows()), list(other.metric_rows())
        )
    seconds = sum(w.seconds for w in ours)
    setting.log.add(
        Measurement(
            "pocket",
            f"three agents, {steps} steps of {config.prompts_per_step} x {config.samples_per_prompt}",
            seconds,
            sum(w.tokens for w in ours),
            against_generate=sum(g.seconds for g in theirs) / seconds,
            note=f"metrics differ by at most {difference:.1e}",
            facts={
                "samplers": [w.sampler.cache_kind for w in ours],
                "generate_s": sum(g.seconds for g in theirs),
                "generate_own_generator_s": sum(w.generate_seconds for w in ours),
                "largest_difference_of_metrics": difference,
                "metrics_compared": compared,
            },
        )
    )


def largest_difference(
    mine: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> tuple[float, int]:
    """Over all numbers of both runs, relative to 1 or the number where it is larger; inf where one
    is missing. The agreement of sampler and trainer is left out: it is about the sampler."""
    largest, compared = 0.0, 0
    if len(mine) != len(other):
        return float("inf"), 0
    for a, b in zip(mine, other, strict=True):
        for key in a.keys() | b.keys():
            if key.startswith("agreement/"):
                continue
            x, y = a.get(key), b.get(key)
            if isinstance(x, (int, float)) and isinstance(y, (int, float)):
                same = x == y
                gap = 0.0 if same else abs(x - y) / max(1.0, abs(x))
                largest = max(largest, gap if isfinite(gap) else float("inf"))
                compared += 1
            elif x != y:
                return float("inf"), compared
    return largest, compared
