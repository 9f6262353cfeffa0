"""Does an engine with weights of its own compute what the trainer computes?

A few short sequences are scored by both. Two questions are asked of the mean difference by token:

- is it small? (1e-4 in float32.) A sync that leaves out a tensor fails here at once, because an
  engine starts from random weights and gets everything it has from the first sync;
- is it still what rounding made it at the first comparison? At a learning rate of 1e-6 a step moves
  log-probabilities by less than 1e-4, so weights that are a step old pass the first question. But
  they differ from the trainer by as much as it has moved, and rounding in float32 is far less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import torch

from hacrl.errors import RunStopped

RANDOM_ROWS, RECENT_ROWS, ROW_TOKENS = 2, 4, 128
"""Sequences of random words, sequences that the engine wrote last, and the most tokens of each."""
RANDOM_TOKENS = 32

ROUNDING_FACTOR = 5.0
"""Beyond so many times the difference seen at first, it is not rounding any more."""
LEAST_ROUNDING = 1e-6
"""A mean difference below it says nothing: float32 keeps 24 bits, log-probabilities reach -10."""

Row = tuple[int, ...]
Scores = list[list[float]]


@dataclass(frozen=True)
class Agreement:
    """One comparison, in log-probability by token.

    Example: Agreement(gap=1.3e-06, largest=8.1e-06, moved=0.0021)
    """

    gap: float
    """Mean absolute difference between engine and trainer."""
    largest: float
    moved: float | None
    """How far the trainer has moved since the comparison before; None at the first."""


class Probe:
    """Compares an engine with the trainer's model, and stops the run where they are not one."""

    def __init__(self, model: Any, agent: str, tolerance: float | None) -> None:
        self.model = model
        self.agent = agent
        exact = next(model.parameters()).dtype == torch.float32
        self.tolerance = tolerance or (1e-4 if exact else 0.2)
        self._sharp = tolerance is None  # a tolerance that was asked for is the only limit
        self._fixed = _random_rows(model.config.get_text_config().vocab_size)
        self._rows: list[Row] = self._fixed
        self._before: Scores | None = None
        self._rounding: float | None = None

    def compare(self, engine: Callable[[Sequence[Row]], Scores]) -> Agreement:
        """Score the rows with both; RunStopped where they disagree."""
        trainer = self._score(self._rows)
        gaps = _differences(trainer, engine(self._rows))
        moved = None if self._before is None else fmean(_differences(trainer, self._before))
        found = Agreement(fmean(gaps), max(gaps), moved)
        self._judge(found)
        if self._rounding is None:
            self._rounding = max(found.gap, LEAST_ROUNDING)
        self._before = trainer
        return found

    def remember(self, rows: Sequence[Row]) -> None:
        """What the engine wrote now takes part in the next comparison: training moves it most."""
        self._rows = [*self._fixed, *(row[:ROW_TOKENS] for row in rows[:RECENT_ROWS])]
        self._before = self._score(self._rows)

    def _judge(self, found: Agreement) -> None:
        if found.gap != found.gap:
            raise RunStopped(
                f"agent {self.agent!r}: log-probabilities are not numbers (nan): the weights have "
                "diverged. Lower the learning rate and start again, or resume from an older checkpoint."
            )
        if found.gap > self.tolerance:
            raise RunStopped(
                f"agent {self.agent!r}: engine and trainer differ by {found.gap:.3g} in a token's "
                f"log-probability, averaged over the probe (allowed: {self.tolerance:g}). The engine's "
                "weights are stale or incomplete, or the two compute different functions. "
                f"{self._way_out(found)}"
            )
        if (
            self._sharp
            and found.moved is not None
            and self._rounding is not None
            and found.gap > ROUNDING_FACTOR * self._rounding
        ):
            raise RunStopped(
                f"agent {self.agent!r}: the engine did not follow the trainer: they differ by "
                f"{found.gap:.3g} in a token's log-probability, averaged over the probe; at the first "
                f"sync it was {self._rounding:.3g}, and the trainer has moved by {found.moved:.3g} "
                f"since the last. The engine's weights are stale. {self._way_out(found)}"
            )

    def _way_out(self, found: Agreement) -> str:
        return (
            'Go on with sampler.kind = "builtin" (`hacrl resume RUN` after changing it in the run\'s '
            "config.toml); if this is the rounding of your model, set sampler.tolerance above "
            f"{found.gap:.2g}."
        )

    @torch.no_grad()
    def _score(self, rows: Sequence[Row]) -> Scores:
        """Row by row, so that the logits of one short sequence are all that is held."""
        scores = []
        for row in rows:
            ids_1L = torch.tensor([row], device=self.model.device)
            logits_LV = self.model(input_ids=ids_1L, use_cache=False).logits[0].float()
            logprobs_LV = logits_LV[:-1].log_softmax(1)
            scores.append(logprobs_LV.gather(1, ids_1L[0, 1:, None]).squeeze(1).tolist())
        return scores


def _differences(one: Scores, other: Scores) -> list[float]:
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return [abs(a - b) for a, b in pairs]


def _random_rows(words: int) -> list[Row]:
    """The same for every run: words from everywhere in the vocabulary."""
    bits = hashlib.shake_256(b"hacrl probe").digest(8 * RANDOM_ROWS * RANDOM_TOKENS)
    drawn = [int.from_bytes(bits[i : i + 8], "little") % words for i in range(0, len(bits), 8)]
    return [tuple(drawn[i::RANDOM_ROWS]) for i in range(RANDOM_ROWS)]
