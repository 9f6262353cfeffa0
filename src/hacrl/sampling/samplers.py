"""Who writes an agent's replies. A new sampler is a file beside this one and an entry in SAMPLERS, or
an import path in the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hacrl.config import SamplerConfig
from hacrl.errors import UserError
from hacrl.importing import import_object
from hacrl.sampling.sampler import Reply, Request, Sampler
from hacrl.sampling.vllm import VllmSampler

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy


class AnySampler(Protocol):
    """What a policy asks of its sampler."""

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests, at the trainer's present weights, by temperature
        alone (0 is greedy)."""

    def weights_changed(self) -> None:
        """The trainer has new weights. Called after every update and every restore, so it should
        only remember that; the next `sample` must use them."""


@runtime_checkable
class Probed(Protocol):
    """A sampler with weights of its own, which it compares with the trainer's."""

    def facts(self) -> dict[str, float]:
        """Of the last comparison, for the metrics of the step."""


def _builtin(policy: Policy, settings: SamplerConfig) -> AnySampler:
    renderer = policy.renderer
    return Sampler(
        policy.model,
        renderer.end_ids,
        renderer.pad_id,
        policy.agent.sampler_rows,
        cache_share=settings.cache_share,
    )


SAMPLERS: dict[str, Callable[[Policy, SamplerConfig], AnySampler]] = {
    "builtin": _builtin,
    "vllm": VllmSampler,
}


def make_sampler(policy: Policy, settings: SamplerConfig) -> AnySampler:
    """The sampler a config asks for. `policy` has its model, device and renderer already."""
    if settings.kind in SAMPLERS:
        return SAMPLERS[settings.kind](policy, settings)
    if ":" not in settings.kind:
        raise UserError(
            f"sampler.kind = {settings.kind!r} is unknown: choose one of {', '.join(SAMPLERS)}, or "
            "give the import path of your own class, module:Name."
        )
    sampler: AnySampler = import_object(settings.kind, "sampler.kind")(policy, settings)
    return sampler


def probe_facts(sampler: AnySampler) -> dict[str, float]:
    """Nothing for a sampler that has the trainer's own weights."""
    return sampler.facts() if isinstance(sampler, Probed) else {}
