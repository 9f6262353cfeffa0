"""What an update reports, and which rows it can leave out because their share is exactly zero.

A loss sees the model through the log-probabilities alone. Its gradient by them (small: one number a
reply token) therefore says, for any algorithm, which rows the backward through the model would add
nothing for: peers outside the trust interval, own rows where the clip wins, rows of advantage 0.

In units of a forward, a backward costs about 2. Of a micro-batch the share q of tokens survives, and
only its forward tells which. It costs, by count of matrix products:

    3        with a graph, all rows backward
    1 + 3q   without a graph, or with one that is dropped; the survivors go forward anew, and backward
    1 + 2q   without a graph; the survivors take their results of the first forward (reuse.py)

Whether to build a graph must be chosen before q is known: by the share of the micro-batches before, and
of the update of the same part before that. A checkpoint holds it, so that a resumed run chooses alike.
A CPU takes the last way: norms, activations and attention of survivors are computed twice, so it loses
where nearly all survive. A GPU takes the second: no pass waits for another, and survivors go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hacrl.policy.batch import Inputs
from hacrl.policy.reuse import Draft
from hacrl.types import LossOutput, MicroBatch, Sample, Update

Loss = Callable[[MicroBatch, Update], LossOutput]
T = TypeVar("T")

REPEAT_BELOW = {"cpu": 0.6, "cuda": 0.45}
"""Survivors' share of a micro-batch's tokens below which they are repeated alone: 2/3 by the count
above, less because a small micro-batch costs more a token, and because a graph that is there is cheaper
than counted for rows without gradient: the head leaves them out. By device, as measured."""
REPEAT_BELOW_CHECKPOINTED = {"cpu": 0.7, "cuda": 0.55}
"""The same with gradient checkpointing, where a backward has a forward in it: 4 against 1 + 4q."""
THIN_BELOW = {"cpu": 0.75, "cuda": 0.6}
"""Expected share below which no graph is built at first: by the counts above 1 on a CPU and 2/3 on a
GPU, less for what is done twice. Above REPEAT_BELOW: there a graph has been paid for already."""


@dataclass(frozen=True)
class Sums:
    """What the micro-batches of a minibatch add up to, before the optimizer's step; the fields are
    those of `UpdateReport`."""

    loss: float
    kl: float
    ratios: tuple[float | None, ...]
    used: tuple[bool | None, ...]
    pruned_forward: int
    pruned_backward: int


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """The sums of all ranks: numbers added, each row's facts from the rank that had the row."""
    return Sums(
        loss=sum(p.loss for p in parts),
        kl=sum(p.kl for p in parts),
        ratios=tuple(merge_rows([p.ratios for p in parts])),
        used=tuple(merge_rows([p.used for p in parts])),
        pruned_forward=parts[0].pruned_forward,
        pruned_backward=sum(p.pruned_backward for p in parts),
    )


def merge_rows(parts: Sequence[Sequence[T | None]]) -> list[Any]:
    """Of each row the value of the rank that has one.

    Example: merge_rows([[0.9, None], [None, 1.1]]) == [0.9, 1.1]
    """
    return [next((v for v in values if v is not None), None) for values in zip(*parts, strict=True)]


@dataclass(frozen=True)
class UpdateReport:
    """What one update did.

    Example: UpdateReport(loss=0.01, grad_norm=0.4, kl=0.0, skipped=False, ratios=(1.0, None),
             used=(True, None), learning_rate=1e-6, pruned_forward=1, pruned_backward=0)
    """

    loss: float
    grad_norm: float
    kl: float
    skipped: bool
    """Loss or gradient was not finite; nothing was changed."""
    ratios: tuple[float | None, ...]
    """s of every sample, in the order given; None for those of `pruned_forward`: never computed."""
    used: tuple[bool | None, ...]
    """Whether its gradient survived the clip; None likewise."""
    learning_rate: float
    pruned_forward: int
    """How many samples did not go through the model at all (advantage 0)."""
    pruned_backward: int
    """How many went forward and not backward (gradient exactly 0)."""


@dataclass(frozen=True)
class AtScores:
    """A loss at the very weights that scored the rows: it is given the log-probabilities that scoring
    found, and its gradient by them is that of the forward.

    Half precision rounds a row by the shape of its micro-batch, and updates cut theirs otherwise than
    scoring did: other rows, and without those of advantage 0. At unchanged weights the two are one
    number rounded twice, but the difference, at times wider than the clip of a sequence's ratio, would
    be taken for a change of the policy. Rows that were not scored stay as they are. The start weights'
    log-probabilities, of the same micro-batch, are moved along: their distance is the forward's.

    Example: policy.update(samples, AtScores(algorithm.loss), update) has own ratios of 1
    """

    loss: Loss

    def __call__(self, batch: MicroBatch, update: Update) -> LossOutput:
        found_BT, scored_BT = batch.logprobs_BT, batch.old_logprobs_BT
        if scored_BT is not None:
            gap_BT = (scored_BT - found_BT.detach()).nan_to_num(0.0)  # nan: not scored
            start_BT = batch.ref_logprobs_BT
            batch = replace(
                batch,
                logprobs_BT=found_BT + gap_BT,
                ref_logprobs_BT=None if start_BT is None else start_BT + gap_BT,
            )
        return self.loss(batch, update)


def survivors(gradient_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Of each row, whether its gradient is anything but exactly zero (nan is)."""
    return ((gradient_BT != 0) & (mask_BT > 0)).any(1)


class Arriving:
    """Values on their way from a GPU to the host: reading them waits for what was begun before them,
    and for nothing that was begun since.

    Example: arriving = Arriving(alive_B); begin_more(); arriving.read()
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._there: torch.cuda.Event | None = None
        if values.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[Any]:
        if self._there:
            self._there.synchronize()
        found: list[Any] = self._values.tolist()
        return found


@dataclass
class Pass:
    """A micro-batch that has gone forward."""

    rows: list[int]
    """Of the minibatch."""
    samples: list[Sample]
    output: LossOutput
    inputs: Inputs
    thin: bool
    """Without a graph."""
    draft: Draft | None
    logprobs_BT: Tensor | None
    gradient_BT: Tensor | None
    alive: Arriving | None
    """Of each row, whether it has a gradient; None where all go backward."""

    @property
    def scouts(self) -> bool:
        """Whether it only tells who survives, and keeps nothing."""
        return self.thin and self.draft is None

    def gradients(self, kept: Sequence[int], gradient_BT: Tensor) -> dict[int, Tensor]:
        """Of these rows, by their place in the minibatch."""
        return {self.rows[b]: gradient_BT[b, : self.inputs.scored[b]] for b in kept}

    @property
    def tokens(self) -> int:
        return self.inputs.tokens

    def take(self) -> tuple[Draft | None, Tensor, Tensor]:
        """What the backward needs, once: a pass that is over keeps no graph."""
        logprobs_BT, gradient_BT = self.logprobs_BT, self.gradient_BT
        assert logprobs_BT is not None and gradient_BT is not None, "taken before"
        draft, self.draft = self.draft, None
        self.logprobs_BT = self.gradient_BT = None
        return draft, logprobs_BT, gradient_BT


class Expected:
    """The share of survivors to expect of an update's next micro-batch: that of those before. Of the
    first, that of the update of the same part before; of the first of all, own rows nearly all survive,
    of peers' a good part lies outside the trust interval.

    Example: Expected("peers").share == 0.5; Expected("peers", before=0.9).share == 0.9
    """

    def __init__(self, part: str, before: float | None = None) -> None:
        self.share = before if before is not None else 0.5 if part == "peers" else 1.0
        self.left = self.tokens = 0

    def learn(self, left: int, tokens: int) -> None:
        """Of so many tokens these survived."""
        self.left, self.tokens = self.left + left, self.tokens + tokens
        self.share = self.left / self.tokens


def repeat_pays(survived: float, device: str, checkpointing: bool = False) -> bool:
    """Whether the survivors of a micro-batch, this share of it, should go forward again alone.

    Example: repeat_pays(0.5, "cpu") is True; repeat_pays(0.5, "cuda") False
    """
    return survived < (REPEAT_BELOW_CHECKPOINTED if checkpointing else REPEAT_BELOW)[device]
