"""The sampler interface: requests, replies, and how a config names its sampler.

A new sampler is a class with the methods of `Sampler` whose constructor takes (policy, settings). Add
it to SAMPLERS, or set sampler.kind to its import path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hacrl.config import SamplerConfig
from hacrl.errors import UserError
from hacrl.importing import import_object

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy

SAMPLERS = {
    "builtin": "hacrl.sampling.engine:builtin_sampler",
    "vllm": "hacrl.sampling.vllm:VllmSampler",
}
"""Import path of each kind; a kind is imported when a config asks for it."""


@dataclass(frozen=True)
class Request:
    """One reply to sample.

    Example: Request(prompt_ids=(1, 9), key=stream_key(seed, "wren", 3, "add-17-25", 0), limit=32)
    """

    prompt_ids: tuple[int, ...]
    key: int
    """Noise stream of the reply (noise.py). The built-in sampler's reply depends only on weights,
    prompt and key."""
    limit: int  # maximum number of new tokens


@dataclass(frozen=True)
class Reply:
    """Sampled tokens, including the end token if there is one.

    Example: Reply(token_ids=(7, 5, 2), logprobs=(-0.1, -0.3, -0.01), stopped=True)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool  # True if the reply ends with an end token, False if it reached its limit


class Sampler(Protocol):
    """What a policy needs from its sampler.

    A sampler with a copy of the weights may also have `facts() -> dict[str, float]`: metrics of its
    last comparison with the trainer.
    """

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests, sampled from the trainer's current weights.

        No top-k or top-p; temperature 0 is greedy.
        """

    def weights_changed(self) -> None:
        """Called after every update and every restore. Must be cheap: a sampler with a copy of the
        weights marks it as stale here and syncs it in the next `sample`."""


def make_sampler(policy: Policy, settings: SamplerConfig) -> Sampler:
    """The sampler that the config names. `policy` must already have model, device and renderer."""
    kind = settings.kind
    if kind not in SAMPLERS and ":" not in kind:
        raise UserError(
            f"sampler.kind = {kind!r} is unknown: choose one of {', '.join(SAMPLERS)}, or give the "
            "import path of a class, package.module:Name."
        )
    made: Sampler = import_object(SAMPLERS.get(kind, kind), "sampler.kind")(policy, settings)
    return made
