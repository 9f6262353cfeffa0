"""Micro-batches through the model: forward, what the loss makes of it, backward.

Rows without gradient are left out, as update.py says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.policy.batch import Divisors, divisors_of, make_batch
from hacrl.policy.logprobs import Inputs, LogProbs, make_inputs
from hacrl.policy.lora import adapter_off
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.offload import Turns
from hacrl.policy.packing import placed
from hacrl.policy.reuse import Draft
from hacrl.policy.update import (
    THIN_BELOW,
    Arriving,
    Expected,
    Loss,
    Pass,
    Sums,
    repeat_pays,
    survivors,
)
from hacrl.policy.weights import Weights
from hacrl.types import LossOutput, Sample, Update


class Learning(Weights):
    """Weights through which a minibatch can go. What is annotated here a `Policy` makes."""

    logprobs: LogProbs
    turns: Turns
    _kl: bool
    """Whether the loss has a KL term."""
    _start: LogProbs | None
    """At the start weights, unless an adapter can be off."""
    _recordable: bool
    _expected: Expected
    _scouts: list[Pass]
    """Gone forward without a graph, and not yet asked which of their rows survive; at most one."""
    _divisors: Divisors

    def _accumulate(
        self,
        samples: Sequence[Sample],
        chosen: Sequence[int],
        loss: Loss,
        update: Update,
    ) -> Sums:
        """Leave in the master the gradient of the `chosen` samples' share of the minibatch's loss."""
        self.turns.take()
        chosen = self._mine(samples, chosen)
        self._expected = Expected(update.part, self.survived.get(update.part))
        self._divisors = divisors_of(samples)
        self._scouts = []
        skip = self.agent.prune and not self._regularised
        forward = [i for i in chosen if samples[i].advantage != 0 or not skip]
        outputs: list[tuple[list[int], LossOutput]] = []
        repeat: dict[int, Tensor] = {}
        backward = 0
        with self._training():
            for rows in self._microbatches(samples, forward):
                begun = self._begin(rows, samples, loss, update)
                outputs.append((begun.rows, begun.output))
                survived, done = self._finish(begun)
                repeat |= survived
                backward += done
            repeat |= self._ask_scouts()
            for rows in self._microbatches(samples, list(repeat)):
                self._pass_again(rows, samples, repeat)
        # Read last: reading waits for a GPU, which meanwhile could begin the next micro-batch.
        total, kl = 0.0, 0.0
        ratios: list[float | None] = [None] * len(samples)
        used: list[bool | None] = [None] * len(samples)
        for rows, output in outputs:
            total += output.loss.item()
            kl += float(output.kl)
            for i, ratio, kept in zip(
                rows, output.ratio_B.tolist(), output.used_B.tolist(), strict=True
            ):
                ratios[i], used[i] = ratio, kept
        return self._together(
            Sums(
                loss=total,
                kl=kl,
                ratios=tuple(ratios),
                used=tuple(used),
                pruned_forward=len(chosen) - len(forward),
                pruned_backward=len(forward) - backward - len(repeat),
            )
        )

    def _mine(self, samples: Sequence[Sample], chosen: Sequence[int]) -> Sequence[int]:
        """Of the rows `chosen`, those that go through here. The ranks of a group share them
        (sharding/)."""
        return chosen

    def _together(self, sums: Sums) -> Sums:
        """What all ranks' rows add up to."""
        return sums

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        # transformers checkpoints in training mode only (dropout is 0), and has no cache in it
        self.network.train(self.agent.gradient_checkpointing)
        try:
            yield
        finally:
            self.network.eval()

    def _microbatches(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[list[int]]:
        lengths = [len(samples[i].token_ids) for i in rows]
        prompts = [samples[i].prompt_ids for i in rows]
        planned = self._planned(lengths, prompts)
        return self._rounds([[rows[i] for i in batch] for batch in planned])

    def _planned(
        self, lengths: Sequence[int], prompts: Sequence[tuple[int, ...]]
    ) -> list[list[int]]:
        return plan_microbatches(
            lengths,
            self.agent.microbatch_tokens,
            padded=not self.logprobs.packs,
            prompts=prompts if self.logprobs.shares else None,
        )

    def _rounds(self, planned: list[list[int]]) -> list[list[int]]:
        """The micro-batches to go through. The ranks of a group go through equally many, so shards
        add empty ones at the end (sharding/)."""
        return planned

    def _idle_forward(self) -> None:
        """The forward of an empty micro-batch: nothing but the group's collectives."""

    def _begin(
        self, rows: Sequence[int], samples: Sequence[Sample], loss: Loss, update: Update
    ) -> Pass:
        """Forward, loss, and its gradient by the log-probabilities. Where few rows are expected to
        survive (update.py) no graph is built."""
        chosen = [samples[i] for i in rows]
        inputs = self._inputs(chosen)
        thin = self._few_survive()
        draft = Draft(self.logprobs, inputs) if thin and self.reuses else None
        with torch.set_grad_enabled(not thin):
            logprobs_BT = draft.logprobs_BT if draft else self.logprobs(inputs)
        batch = make_batch(
            chosen,
            inputs,
            logprobs_BT.detach().requires_grad_(),
            self._start_logprobs(inputs) if self._regularised else None,
            self._divisors,
        )
        output = loss(batch, update)
        (gradient_BT,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
        alive = Arriving(survivors(gradient_BT, batch.mask_BT)) if self.agent.prune else None
        return Pass(
            list(rows), chosen, output, inputs, thin, draft, logprobs_BT, gradient_BT, alive
        )

    def _finish(self, begun: Pass) -> tuple[dict[int, Tensor], int]:
        """Backward; how many rows took it. Of survivors that have no graph the gradients are returned
        instead, for a pass of their own."""
        later = self._ask_scouts()
        if begun.scouts:
            self._scouts.append(begun)
            return later, 0
        draft, logprobs_BT, gradient_BT = begun.take()
        if begun.alive:
            kept, survived = self._survivors(begun)
            if draft and draft.usable:
                if kept:
                    inputs = self._inputs([begun.samples[b] for b in kept])
                    kept_BT = gradient_BT[placed(torch.tensor(kept), self.device)]
                    width = inputs.reply_mask_BT.shape[1]
                    self._backward(draft.again(kept, inputs), kept_BT[:, :width])
                elif survived:  # other ranks have survivors
                    self._pass_again([], [], {})
                return later, len(kept)
            checkpointing = self.agent.gradient_checkpointing
            if draft or repeat_pays(survived, self.device.type, checkpointing):
                return later | begun.gradients(kept, gradient_BT), 0
        self._backward(logprobs_BT, gradient_BT)
        return later, len(begun.rows)

    def _ask_scouts(self) -> dict[int, Tensor]:
        """The gradients of a scouting pass's survivors. A GPU is asked when it has the next pass to do,
        so it never waits."""
        later: dict[int, Tensor] = {}
        while self._scouts:
            one = self._scouts.pop()
            _, _, gradient_BT = one.take()
            later |= one.gradients(self._survivors(one)[0], gradient_BT)
        return later

    def _survivors(self, begun: Pass) -> tuple[list[int], float]:
        """The rows of a micro-batch that have a gradient, and their share of its tokens, which is what
        the next one is expected to have."""
        assert begun.alive is not None
        kept = [b for b, lives in enumerate(begun.alive.read()) if lives]
        left, tokens = self._everywhere(
            begun.inputs.layout.tokens_of(kept), begun.tokens if begun.rows else 0
        )
        self._expected.learn(left, tokens)
        return kept, left / tokens

    def _few_survive(self) -> bool:
        """Whether the next micro-batch is expected to leave so much out that its first forward should
        build no graph."""
        able = self.scouts or self.reuses
        return self.agent.prune and able and self._expected.share < THIN_BELOW[self.device.type]

    @property
    def scouts(self) -> bool:
        """Whether such a forward only tells who survives: a GPU does a few large passes with all of them
        faster than many small ones that reuse products."""
        return self.device.type == "cuda"

    @property
    def reuses(self) -> bool:
        """Whether survivors take what such a forward has multiplied (reuse.py). Checkpointing keeps
        nothing that could be taken."""
        return (
            not self.scouts
            and self.logprobs.packs
            and self.logprobs.plain_head
            and self._recordable
            and not self.agent.gradient_checkpointing
        )

    def _everywhere(self, *counts: int) -> tuple[int, ...]:
        """Summed over all ranks: each must go the same way."""
        return counts

    def _pass_again(
        self, rows: Sequence[int], samples: Sequence[Sample], gradients: Mapping[int, Tensor]
    ) -> None:
        """Forward and backward of survivors, with the gradients of their first pass."""
        gradient_BT = pad_sequence([gradients[i] for i in rows], batch_first=True)
        self._backward(self.logprobs(self._inputs([samples[i] for i in rows])), gradient_BT)

    def _backward(self, logprobs_BT: Tensor, gradient_BT: Tensor) -> None:
        logprobs_BT.backward(gradient_BT)

    def _inputs(self, samples: Sequence[Sample]) -> Inputs:
        return make_inputs(
            [s.token_ids for s in samples],
            [s.loss_mask for s in samples],
            self.renderer.pad_id,
            self.device,
            share=self.logprobs.shares,
        )

    @property
    def _regularised(self) -> bool:
        """Whether the minibatch has a KL term, which is of own samples."""
        return self._kl and self._divisors.num_own > 0

    @torch.no_grad()
    def _start_logprobs(self, inputs: Inputs) -> Tensor:
        """At the start weights, for the KL term."""
        if self._start is not None:
            return self._start(inputs)
        with adapter_off(self.model):
            return self.logprobs(inputs)
