"""One agent's policy: scoring and updating. What it is made of is in weights.py, how a minibatch goes
through it in learning.py."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.policy.learning import Learning
from hacrl.policy.logprobs import LogProbs, make_inputs
from hacrl.policy.offload import Turns
from hacrl.policy.packing import attending_again
from hacrl.policy.reuse import recordable
from hacrl.policy.update import AtScores, Loss, UpdateReport
from hacrl.sampling.base import Sampler, make_sampler
from hacrl.types import Sample, Update


class Policy(Learning):
    """Weights that score, sample and learn.

    Example: policy.score([(prompt_ids, reply_ids)]); policy.update(samples, algorithm.loss, update)
    """

    def __init__(
        self,
        agent: AgentConfig,
        *,
        device: str,
        temperature: float,
        beta: float,
        sampler: SamplerConfig | None = None,
    ) -> None:
        self._kl = beta > 0 and agent.learns
        super().__init__(agent, device)
        if agent.gradient_checkpointing:
            self.network.gradient_checkpointing_enable(
                {"use_reentrant": False, "context_fn": attending_again}
            )
        self.logprobs = self._scorer(self.network, temperature)
        self._recordable = recordable(self.logprobs.model)
        self.sampler: Sampler = make_sampler(self, sampler or SamplerConfig())
        self._scored_step: int | None = None
        """Whose own replies carry scores of the present weights; None once these have changed."""
        # A frozen second copy, unless an adapter can be off.
        self._start: LogProbs | None = None
        if self._kl and not agent.lora:
            self._start = self._scorer(self._frozen_copy(), temperature)
            self.logprobs.shares &= self._start.shares  # both are given the same rows
        self._gather_gradients()
        self.turns = self._make_turns()

    def _scorer(self, model: Any, temperature: float) -> LogProbs:
        return LogProbs(model, temperature)

    def _frozen_copy(self) -> Any:
        """The start weights, for the KL term."""
        return copy.deepcopy(self.model).requires_grad_(False).eval()

    def _make_turns(self) -> Turns:
        start = self._start.model if self._start else None
        return Turns(
            self.device, self.agent.offload, self.model, self.master, self.optimizer, start
        )

    # ------------------------------------------------------------ scoring

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Token log-probabilities of each (prompt ids, reply ids) at the present weights."""
        found: list[tuple[list[int], Tensor]] = []
        lengths = [len(p) + len(r) for p, r in sequences]
        for rows in self._rounds(
            self._planned(lengths, [tuple(p) if r else () for p, r in sequences])
        ):
            if not rows:
                self._idle_forward()
                continue
            logprobs_BT = self.logprobs(
                make_inputs(
                    [[*sequences[i][0], *sequences[i][1]] for i in rows],
                    [[0] * len(sequences[i][0]) + [1] * len(sequences[i][1]) for i in rows],
                    self.renderer.pad_id,
                    self.device,
                    share=self.logprobs.shares,
                )
            )
            found.append((rows, logprobs_BT))
        scores: list[list[float]] = [[] for _ in sequences]
        for rows, logprobs_BT in found:  # read last, as in an update
            for i, values in zip(rows, logprobs_BT.tolist(), strict=True):
                scores[i] = values[: len(sequences[i][1])]
        return scores

    def keep_scores(self, step: int) -> None:
        """The step's own replies carry what `score` said of them, at the present weights. Those read
        from a journal may carry what other weights said: it is not told of them."""
        self._scored_step = step

    def at_scores(self, loss: Loss, step: int) -> Loss:
        """The loss for an update of the step: at the scores, as long as the weights are theirs. Not in
        float32: it needs none, and a resumed step, which is not scored again, is equal."""
        return AtScores(loss) if self.half and self._scored_step == step else loss

    # ------------------------------------------------------------ learning

    def update(
        self,
        samples: Sequence[Sample],
        loss: Loss,
        update: Update,
    ) -> UpdateReport:
        """One parameter update on a minibatch, in micro-batches whose losses add up to its loss.

        With `prune`, rows without gradient are left out of the backward pass, and rows with advantage 0
        also of the forward pass (unless there is a KL term). Divisors and the optimizer's step are
        the same as with these rows.
        """
        sums = self._accumulate(samples, range(len(samples)), loss, update)
        rate = self._learning_rate()
        norm = self._gradient_norm()
        finite = all(map(_finite, (sums.loss, norm)))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._weights_changed()
            self.updates_made += 1
            if self._expected.tokens:
                self.survived[update.part] = self._expected.share
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return UpdateReport(
            loss=sums.loss,
            grad_norm=norm,
            kl=sums.kl,
            skipped=not finite,
            ratios=sums.ratios,
            used=sums.used,
            learning_rate=rate,
            pruned_forward=sums.pruned_forward,
            pruned_backward=sums.pruned_backward,
        )

    def gradient(
        self,
        samples: Sequence[Sample],
        rows: Sequence[int],
        loss: Loss,
        update: Update,
    ) -> dict[str, Tensor]:
        """What the samples `rows` of a minibatch add to its gradient at the present weights, before
        any clipping. For diagnostics: weights, optimizer, counts and expectations stay as they are."""
        self._accumulate(samples, rows, loss, update)
        found = {}
        for name, parameter in self.master.items():
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
        return found

    def _gradient_norm(self) -> float:
        """Scale the gradient down to the allowed norm; its norm before that.

        A parameter that no row reached gets a gradient of zero: the optimizer would pass over it
        otherwise, and its step would depend on what was pruned.
        """
        for parameter in self.master.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        limit = self.agent.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(self.master.values(), limit).item()

    def _weights_changed(self) -> None:
        super()._weights_changed()
        self.sampler.weights_changed()
        self._scored_step = None

    def _learning_rate(self) -> float:
        """Of the next update: rising over the warm-up, then constant."""
        warmup = self.agent.warmup_updates
        return self.agent.learning_rate * min(1.0, (self.updates_made + 1) / max(warmup, 1))

    def rest(self) -> None:
        """No update comes for a while: gradients go, and what else only updates need may wait on the
        host (offload.py)."""
        self.turns.rest()


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
