"""Algorithms: one file each, one entry in `ALGORITHMS`.

An algorithm turns a step's groups into advantages and weights (`credit`) and a micro-batch into a
loss (`loss`). The trainer never branches on its name; what it needs, it declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, get_args

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.f_tis import FTis
from hacrl.algorithms.graft import Graft
from hacrl.algorithms.grpo import Grpo
from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.hacpo import Hacpo
from hacrl.algorithms.naive import Naive
from hacrl.algorithms.overlap import Overlap
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.algorithms.sgt import Sgt
from hacrl.errors import UserError
from hacrl.importing import import_object
from hacrl.types import Batch, Group, LossOutput, Order, Sample, Update


class Algorithm(Protocol):
    """What the agent asks of an algorithm. What has a value here may be left out: `declared`."""

    shares: bool
    """Learns from peers' samples. If not, views hold own samples only."""
    needs_behaviour: bool
    """Cannot use a peer's sample without its mean log-probability."""
    needs_old_logprobs: bool
    """Wants the learner's token log-probabilities from before the first update of the step; the
    peers' samples that credit keeps are then scored once, too."""
    needs_tokens: bool
    """Wants every source's token log-probabilities (`source_logprobs`): members then publish their
    tokens, and a view has those of peers with the learner's vocabulary as they are, no others."""
    peers_join: bool
    """Peers' samples join the updates of the learner's own samples to the same problems, and the
    plan is that of the learner alone; problems of which only peers' samples are left come last. If
    not, peers' samples have updates of their own (`order`)."""
    scores_before_credit: bool = False
    """`credit` wants the learner's token log-probabilities on every peer's sample (`old_logprobs`), to
    weigh it by."""
    weighs_by_ratio: bool = True
    """A peer's sample weighs its ratio times its weight in the loss; if not, its weight alone (for the
    metrics of effective samples)."""
    order: Order = "own_first"
    """Order of a step's updates where the settings leave it to the algorithm."""
    zero_advantage_is_zero_loss: bool = False
    """A row of advantage 0 adds exactly nothing, the KL term aside, and no other row's share depends
    on it: the trainer may leave it out. A class with a `loss` of its own must say it again (see
    `skips_zero_advantage`)."""

    def credit(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Group],
        capability: Capability,
        learner: str,
    ) -> list[Sample]:
        """The samples with advantage and weight, in their order; those left out take no part (they
        are neither scored nor counted). Groups hold every member's judged rewards, also of samples
        that a view lost."""

    def loss(self, batch: Batch, update: Update) -> LossOutput:
        """The micro-batch's share of the minibatch's loss."""


ALGORITHMS: dict[str, Any] = {
    "hacpo": Hacpo,
    "gspo": Gspo,
    "grpo": Grpo,
    "naive": Naive,
    "sgt": Sgt,
    "graft": Graft,
    "f-tis": FTis,
    "overlap": Overlap,
}


def declared(algorithm: Algorithm, name: str) -> Any:
    """What the algorithm says, or the protocol where it says nothing: an algorithm from elsewhere need
    not derive from a class of ours."""
    return getattr(algorithm, name, getattr(Algorithm, name))


def skips_zero_advantage(algorithm: Algorithm) -> bool:
    """Whether the class that wrote `loss`, or one derived from it, declares
    zero_advantage_is_zero_loss: a parent's word does not hold for another loss."""
    for kind in type(algorithm).__mro__:
        if "zero_advantage_is_zero_loss" in vars(kind):
            return bool(vars(kind)["zero_advantage_is_zero_loss"])
        if "loss" in vars(kind):
            return False
    return False


def order_of(algorithm: Algorithm, settings: AlgorithmSettings) -> Order:
    """The order of a step's updates: as set, or the algorithm's own."""
    if settings.order != "auto":
        return settings.order
    return declared(algorithm, "order")


def make_algorithm(settings: AlgorithmSettings, reward_range: tuple[float, float]) -> Algorithm:
    """The algorithm that the settings name; `reward_range` is what the verifier declares."""
    if settings.name in ALGORITHMS:
        return ALGORITHMS[settings.name](settings, reward_range)
    if ":" in settings.name:
        return _checked(import_object(settings.name, "algorithm.name")(settings, reward_range))
    raise UserError(
        f"algorithm.name = {settings.name!r} is unknown. There are: {', '.join(ALGORITHMS)}; "
        "or give an import path like 'my_package.my_module:MyAlgorithm'."
    )


def _checked(algorithm: Any) -> Algorithm:
    """An algorithm from elsewhere, if it says everything that the trainer asks."""
    for name in ("shares", "needs_behaviour", "needs_old_logprobs", "needs_tokens", "peers_join"):
        if not hasattr(algorithm, name):
            raise UserError(
                f"{type(algorithm).__name__} does not declare {name}: put `{name} = False` "
                "(or True) into the class. hacrl.algorithms.Algorithm tells what it means."
            )
    if (order := declared(algorithm, "order")) not in (known := get_args(Order)):
        raise UserError(
            f"{type(algorithm).__name__} declares order = {order!r}. There are: {', '.join(known)}."
        )
    return algorithm
