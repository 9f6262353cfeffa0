"""Compare a sampler that has a copy of the weights with the trainer.

Both score a few short sequences. The mean difference of a token's log-probability must pass two checks:

- it is small (1e-4 in float32). A sync that misses a tensor fails here at the start, because the engine
  is initialised with random weights;
- it is not much larger than at the first comparison. At a learning rate of 1e-6 one step changes
  log-probabilities by less than 1e-4, so weights that are one step old pass the first check. Their
  difference is still several times the rounding error seen at the start.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import torch

from hacrl.errors import RunStopped

RANDOM_ROWS, RANDOM_TOKENS = 2, 32  # number and length of the fixed random sequences
RECENT_ROWS, RECENT_TOKENS = 4, 128
"""Number and maximum length of the engine's latest sequences in the probe."""
ROUNDING_FACTOR = 5.0
"""A difference larger than this multiple of the first one is not explained by rounding."""
MIN_ROUNDING = 1e-6
"""Smallest rounding error assumed: float32 has 24 bits and log-probabilities reach -10."""

Row = tuple[int, ...]
Scores = list[list[float]]


@dataclass(frozen=True)
class Agreement:
    """One comparison; differences of a token's log-probability.

    Example: Agreement(gap=1.3e-06, largest=8.1e-06, moved=0.0021)
    """

    gap: float  # mean absolute difference between engine and trainer
    largest: float  # largest absolute difference
    moved: float | None
    """Mean change of the trainer since the previous comparison; None at the first."""


class Probe:
    """Compares an engine with the trainer's model and stops the run if they disagree."""

    def __init__(
        self, model: Any, agent: str, tolerance: float | None, longest: int = RECENT_TOKENS
    ) -> None:
        """`longest`: maximum length of a sequence that the engine scores."""
        self.model = model
        self.agent = agent
        exact = next(model.parameters()).dtype == torch.float32
        self.tolerance = tolerance or (1e-4 if exact else 0.2)
        self._check_rounding = tolerance is None  # a configured tolerance replaces the second check
        self._longest = min(longest, RECENT_TOKENS)
        words = model.config.get_text_config().vocab_size
        self._fixed = [row[: self._longest] for row in _random_rows(words)]
        self._rows: list[Row] = self._fixed
        self._before: Scores | None = None
        self._rounding: float | None = None

    def compare(self, engine: Callable[[Sequence[Row]], Scores]) -> Agreement:
        """Score the probe's sequences with both. Raises RunStopped if they disagree."""
        trainer = self.score(self._rows)
        gaps = _differences(trainer, engine(self._rows))
        moved = None if self._before is None else fmean(_differences(trainer, self._before))
        found = Agreement(fmean(gaps), max(gaps), moved)
        self._check(found)
        if self._rounding is None and self._check_rounding:
            self._rounding = max(found.gap, MIN_ROUNDING)
        self._before = trainer
        return found

    def remember(self, rows: Sequence[Row]) -> None:
        """Use the engine's latest sequences in the next comparison: training changes them most."""
        self._rows = [*self._fixed, *(row[: self._longest] for row in rows[:RECENT_ROWS])]
        self._before = self.score(self._rows)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Scores:
        """The trainer's log-probabilities of all tokens but the first of each row."""
        scores = []
        for row in rows:  # one at a time, to hold the logits of one sequence only
            ids_1L = torch.tensor([row], device=self.model.device)
            logits_LV = self.model(input_ids=ids_1L, use_cache=False).logits[0].float()
            logprobs_LV = logits_LV[:-1].log_softmax(1)
            scores.append(logprobs_LV.gather(1, ids_1L[0, 1:, None]).squeeze(1).tolist())
        return scores

    def _check(self, found: Agreement) -> None:
        if found.gap != found.gap:
            raise RunStopped(
                f"agent {self.agent!r}: log-probabilities are NaN: training has diverged. Lower the "
                "learning rate and start again, or resume from an older checkpoint."
            )
        problem = None
        if found.gap > self.tolerance:
            problem = (
                f"(allowed: {self.tolerance:g}). The engine's weights are stale or incomplete, or the "
                "engine computes another function"
            )
        elif self._rounding is not None and found.gap > ROUNDING_FACTOR * self._rounding:
            problem = (
                f"(at the first sync: {self._rounding:.3g}), and the trainer has changed by "
                f"{found.moved:.3g} since the last one. The engine's weights are stale"
            )
        if problem:
            raise RunStopped(
                f"agent {self.agent!r}: engine and trainer differ by {found.gap:.3g} in the mean "
                f'log-probability of a token {problem}. Set sampler.kind = "builtin" in the run\'s '
                "config.toml and continue with `hacrl resume RUN`; if the difference is rounding, set "
                f"sampler.tolerance above {found.gap:.2g}."
            )


def _differences(one: Scores, other: Scores) -> list[float]:
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return [abs(a - b) for a, b in pairs]


def _random_rows(words: int) -> list[Row]:
    """Random ids from the whole vocabulary, the same in every run."""
    bits = hashlib.shake_256(b"hacrl probe").digest(8 * RANDOM_ROWS * RANDOM_TOKENS)
    drawn = [int.from_bytes(bits[i : i + 8], "little") % words for i in range(0, len(bits), 8)]
    return [tuple(drawn[i::RANDOM_ROWS]) for i in range(RANDOM_ROWS)]
