"""Metrics under the names of other trainers, for charts that users already have (docs/logging.md)."""

from collections.abc import Mapping, Sequence
from typing import Literal

Trainer = Literal["trl", "verl"]

ALIASES: dict[Trainer, dict[str, str]] = {
    "trl": {
        "reply_tokens": "completions/mean_length",
        "truncated": "completions/clipped_ratio",
        "own/clipped": "clip_ratio/region_mean",
        "agreement/mean_gap": "sampling/sampling_logp_difference/mean",
        "agreement/max_gap": "sampling/sampling_logp_difference/max",
        "reward/NAME": "rewards/NAME/mean",
    },
    "verl": {
        "reward": "critic/rewards/mean",
        "reply_tokens": "response_length/mean",
        "truncated": "response_length/clip_ratio",
        "loss": "actor/pg_loss",
        "own/clipped": "actor/pg_clipfrac",
        "kl": "actor/kl_loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
    },
}
"""Trainer -> metric of a training row -> its name there. NAME stands for any name."""


def with_aliases(values: Mapping[str, float], trainers: Sequence[Trainer]) -> dict[str, float]:
    """The values, and those with an alias again under it.

    Example: with_aliases({"truncated": 0.1}, ["trl"])["completions/clipped_ratio"] == 0.1
    """
    found = dict(values)
    for key, value in values.items():
        start, has_name, name = key.partition("/")
        for names in (ALIASES[trainer] for trainer in trainers):
            alias = names.get(key) or (names.get(f"{start}/NAME") if has_name else None)
            if alias:
                found[alias.replace("NAME", name)] = value
    return found
