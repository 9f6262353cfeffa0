"""Algorithms: one file each, one entry in `ALGORITHMS`.

An algorithm turns a step's groups into advantages and weights (`credit`) and a micro-batch into a
loss (`loss`). The trainer never branches on its name; what it needs, it declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hacrl.algorithms.grpo import Grpo
from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.hacpo import Hacpo
from hacrl.algorithms.naive import Naive
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.capability import Capability
from hacrl.errors import UserError
from hacrl.importing import import_object
from hacrl.types import Batch, Group, LossOutput, Sample, Update


class Algorithm(Protocol):
    """What the agent asks of an algorithm."""

    shares: bool
    """Learns from peers' samples. If not, views hold own samples only."""
    needs_behaviour: bool
    """Cannot use a peer's sample without its mean log-probability."""
    needs_old_logprobs: bool
    """Wants the learner's token log-probabilities from before the first update of the step; peers'
    samples are then scored once, too."""

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        """The samples with advantage and weight. Groups hold every member's judged rewards, also
        of samples that a view lost."""

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        """The micro-batch's share of the minibatch's loss."""


ALGORITHMS: dict[str, Any] = {"hacpo": Hacpo, "gspo": Gspo, "grpo": Grpo, "naive": Naive}


def make_algorithm(settings: AlgorithmSettings, reward_range: tuple[float, float]) -> Algorithm:
    """The algorithm that the settings name; `reward_range` is what the verifier declares."""
    if settings.name in ALGORITHMS:
        return ALGORITHMS[settings.name](settings, reward_range)
    if ":" in settings.name:
        return import_object(settings.name, "algorithm.name")(settings, reward_range)
    raise UserError(
        f"algorithm.name = {settings.name!r} is unknown. There are: {', '.join(ALGORITHMS)}; "
        "or give an import path like 'my_package.my_module:MyAlgorithm'."
    )
