"""Micro-batches through the model: forward, what the loss makes of it, backward.

Rows without gradient are left out, as update.py says. On a GPU one micro-batch is begun before another
is finished.
"""

from __future__ import annotations

import contextlib
from collections import deque
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
    DRAFT_BELOW,
    DRAFT_KEEPS,
    DRAFT_TOKENS,
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
    _unread: list[Pass]
    """Gone backward before it was asked which of their rows have a gradient; at most one."""
    _divisors: Divisors

    def _accumulate(
        self,
        samples: Sequence[Sample],
        chosen: Sequence[int],
        loss: Loss,
        update: Update,
        zero_advantage_is_zero_loss: bool,
    ) -> Sums:
        """Leave in the master the gradient of the `chosen` samples' share of the minibatch's loss."""
        self.turns.take()
        chosen = self._mine(samples, chosen)
        self._expected = Expected(update.part, self.survived.get(update.part))
        self._divisors = divisors_of(samples)
        self._unread = []
        skip = self.agent.prune and zero_advantage_is_zero_loss and not self._regularised
        forward = [i for i in chosen if samples[i].advantage != 0 or not skip]
        outputs: list[tuple[list[int], LossOutput]] = []
        repeat: dict[int, Tensor] = {}
        backward = 0
        with self._training():
            for begun in self._passes(samples, forward, loss, update):
                outputs.append((begun.rows, begun.output))
                survived, done = self._finish(begun)
                repeat |= survived
                backward += done
            self._look_back()
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

    def _microbatches(
        self, samples: Sequence[Sample], rows: Sequence[int], part: float = 1.0
    ) -> list[list[int]]:
        lengths = [len(samples[i].token_ids) for i in rows]
        prompts = [samples[i].prompt_ids for i in rows]
        planned = self._planned(lengths, prompts, part)
        return self._rounds([[rows[i] for i in batch] for batch in planned])

    def _planned(
        self, lengths: Sequence[int], prompts: Sequence[tuple[int, ...]], part: float = 1.0
    ) -> list[list[int]]:
        """Micro-batches of `microbatch_tokens`, or of this part of them."""
        return plan_microbatches(
            lengths,
            max(1, int(part * self.agent.microbatch_tokens)),
            padded=not self.logprobs.packs,
            prompts=prompts if self.logprobs.shares else None,
        )

    def _rounds(self, planned: list[list[int]]) -> list[list[int]]:
        """The micro-batches to go through. The ranks of a group go through equally many, so shards
        add empty ones at the end (sharding/)."""
        return planned

    def _idle_forward(self) -> None:
        """The forward of an empty micro-batch: nothing but the group's collectives."""

    @property
    def works_ahead(self) -> bool:
        """Whether a draft is begun before the survivors of the one before are gone through. Not with an
        adapter: its draft keeps more than a graph."""
        return self.device.type == "cuda" and not self.agent.lora

    def _passes(
        self, samples: Sequence[Sample], rows: Sequence[int], loss: Loss, update: Update
    ) -> Iterator[Pass]:
        """Micro-batches that have gone forward, each to be finished before the next is asked for.

        Which rows of a draft survive is known when a GPU is done with it. So that it need not wait
        while their pass is prepared, the next draft is begun before, unless nothing is known yet of how
        many survive. Two of them are more than one graph, so they are smaller.
        """
        ahead = self.works_ahead and self._drafts()
        batches = deque(self._microbatches(samples, rows, DRAFT_TOKENS if ahead else 1.0))
        waiting: Pass | None = None
        while batches:
            if ahead and not self._drafts():
                ahead = False  # nearly all survive: graphs, each of full size and alone
                batches = deque(self._microbatches(samples, [i for b in batches for i in b]))
            if waiting and not ahead:
                yield waiting
                waiting = None
            begun = self._begin(batches.popleft(), samples, loss, update)
            if waiting:
                waiting.beside = begun.tokens
                yield waiting
            waiting = begun
            # A row longer than that stands alone; such come first, so what follows is not larger.
            small = begun.tokens <= DRAFT_TOKENS * self.agent.microbatch_tokens
            if not (ahead and small and begun.draft and self._expected.known):
                yield waiting
                waiting = None
        if waiting:
            yield waiting

    def _begin(
        self, rows: Sequence[int], samples: Sequence[Sample], loss: Loss, update: Update
    ) -> Pass:
        """Forward, loss, and its gradient by the log-probabilities. Where few rows are expected to
        survive (update.py) no graph is built."""
        chosen = [samples[i] for i in rows]
        inputs = self._inputs(chosen)
        draft = Draft(self.logprobs, inputs) if self._drafts() else None
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
        return Pass(list(rows), chosen, output, inputs, draft, logprobs_BT, gradient_BT, alive)

    def _finish(self, begun: Pass) -> tuple[dict[int, Tensor], int]:
        """Backward; how many rows took it. Of rows that cannot take it now the gradients are returned
        instead, for a pass of their own: survivors whose graph was dropped, as fewer survive than
        expected, or whose draft is not usable or leaves them no room."""
        self._look_back()
        draft, logprobs_BT, gradient_BT = begun.take()
        if begun.alive and not draft and self.goes_on:
            self._unread.append(begun)
        elif begun.alive:
            kept, survived = self._survivors(begun)
            repeat = draft or repeat_pays(survived, self.agent.gradient_checkpointing)
            anew = kept if repeat else None
            if draft and draft.usable:
                now, anew = self._room(begun, kept)
                if now:
                    inputs = self._inputs([begun.samples[b] for b in now])
                    now_BT = gradient_BT[placed(torch.tensor(now), self.device)]
                    width = inputs.reply_mask_BT.shape[1]
                    self._backward(draft.again(now, inputs), now_BT[:, :width])
                elif survived and not kept:  # other ranks have survivors
                    self._pass_again([], [], {})
            if anew is not None:
                lengths = {b: begun.samples[b].num_reply_tokens for b in anew}
                later = {begun.rows[b]: gradient_BT[b, :n] for b, n in lengths.items()}
                return later, len(kept) - len(anew)
        self._backward(logprobs_BT, gradient_BT)
        return {}, len(begun.rows)

    @property
    def goes_on(self) -> bool:
        """Whether the backward follows without asking which rows have a gradient: nearly all, as far as
        is known, and a GPU would wait for the answer. Those without add exact zeros."""
        if self.device.type != "cuda" or not self._expected.known:
            return False
        return not repeat_pays(self._expected.share, self.agent.gradient_checkpointing)

    def _look_back(self) -> None:
        """At micro-batches whose survivors were not asked for: by now a GPU has long said which."""
        while self._unread:
            self._survivors(self._unread.pop())

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

    def _room(self, begun: Pass, kept: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of these rows, those whose graph has room beside the draft that was begun since, so that both
        keep no more than a graph may; and those that are left over."""
        layout = begun.inputs.layout
        room = self.agent.microbatch_tokens - DRAFT_KEEPS * begun.beside
        now: list[int] = []
        anew: list[int] = []
        prompts: set[int] = set()
        for b in kept:
            there = layout.prompts[b] if layout.prompt_at[b] in prompts else 0
            tokens = layout.lengths[b] - there
            if tokens > room and begun.beside:
                anew.append(b)
                continue
            now.append(b)
            prompts.add(layout.prompt_at[b])
            room -= tokens
        return now, anew

    def _drafts(self) -> bool:
        """Whether the next micro-batch is expected to leave so much out that its first forward should
        build no graph. Checkpointing keeps nothing that could be used again."""
        return (
            self.agent.prune
            and self.logprobs.packs
            and self.logprobs.plain_head
            and self._recordable
            and not self.agent.gradient_checkpointing
            and self._expected.share < DRAFT_BELOW[self.device.type]
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
