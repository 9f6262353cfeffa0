"""The gradient of a minibatch: micro-batches through forward, loss and backward.

Rows without gradient are skipped (update.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.policy.batch import Inputs, divisors_of, make_batch, make_inputs
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.packing import to_device
from hacrl.policy.reuse import Draft
from hacrl.policy.update import (
    THIN_BELOW,
    Arriving,
    Expected,
    Loss,
    Pass,
    Sums,
    merge_sums,
    repeat_pays,
    survivors,
)
from hacrl.types import LossOutput, MicroBatch, Sample, Update

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy


def microbatches(
    policy: Policy,
    rows: Sequence[int],
    lengths: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
) -> list[list[int]]:
    """Split `rows` into micro-batches; `lengths` and `prompts` are of all rows. Every rank gets the
    same number of micro-batches, because each forward is a collective; the last ones may be empty."""
    planned = plan_microbatches(
        [lengths[i] for i in rows],
        policy.agent.microbatch_tokens,
        padded=not policy.logprobs.packs,
        prompts=[prompts[i] for i in rows] if policy.logprobs.shares else None,
    )
    most = max(policy.ranks.gather(len(planned)))
    return [[rows[i] for i in batch] for batch in planned] + [[]] * (most - len(planned))


class GradientPass:
    """One minibatch's way through the model, up to the gradient.

    Example: GradientPass(policy, samples, algorithm.loss, update).run(range(len(samples)))
    """

    def __init__(
        self, policy: Policy, samples: Sequence[Sample], loss: Loss, update: Update
    ) -> None:
        self.policy, self.samples, self.loss, self.update = policy, samples, loss, update
        self.agent, self.device, self.logprobs = policy.agent, policy.device, policy.logprobs
        self.divisors = divisors_of(samples)
        self.regularised = policy.start_logprobs is not None and self.divisors.num_own > 0
        """Whether the minibatch has a KL term, which is of own samples."""
        self.expected = Expected(update.part, policy.survived.get(update.part))
        self.scouting: list[Pass] = []
        """Passes without a graph whose surviving rows have not been read yet; at most one."""
        pad = policy.renderer.pad_id
        self.idle = Sample("", 0, "", False, (pad, pad), (0, 1), 0.0, (0.0,), (0.0,))
        """Fills the micro-batch of a rank that has no more rows."""

    def run(self, chosen: Sequence[int]) -> Sums:
        """Add to the master the gradient of the samples `chosen`, divided by the counts of the whole
        minibatch."""
        samples = self.samples
        skip = self.agent.prune and not self.regularised
        forward = [i for i in chosen if samples[i].advantage != 0 or not skip]
        mine = [
            forward[i]
            for i in self.policy.ranks.split(
                [samples[i].prompt_ids for i in forward],
                [len(samples[i].token_ids) for i in forward],
            )
        ]
        outputs: list[tuple[list[int], LossOutput]] = []
        repeat: dict[int, Tensor] = {}
        backward = 0
        with self._training():
            for rows in self._microbatches(mine):
                begun = self._begin(rows)
                outputs.append((begun.rows, begun.output))
                survived, done = self._finish(begun)
                repeat |= survived
                backward += done
            repeat |= self._ask_scouts()
            for rows in self._microbatches(list(repeat)):
                self._pass_again(rows, repeat)
        # Read last: reading waits for a GPU, which meanwhile could begin the next micro-batch.
        total, kl = 0.0, 0.0
        ratios: list[float | None] = [None] * len(samples)
        used: list[bool | None] = [None] * len(samples)
        for rows, output in outputs:
            total += output.loss.item()
            kl += float(output.kl)
            for i, ratio, kept in zip(
                rows, output.ratio_B.tolist(), output.used_B.tolist(), strict=False
            ):
                ratios[i], used[i] = ratio, kept
        return merge_sums(
            self.policy.ranks.gather(
                Sums(
                    loss=total,
                    kl=kl,
                    ratios=tuple(ratios),
                    used=tuple(used),
                    pruned_forward=len(chosen) - len(forward),
                    pruned_backward=len(mine) - backward - len(repeat),
                )
            )
        )

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        # transformers checkpoints activations only in training mode, which has no KV cache; dropout is 0
        self.policy.network.train(self.agent.gradient_checkpointing)
        try:
            yield
        finally:
            self.policy.network.eval()

    def _microbatches(self, rows: Sequence[int]) -> list[list[int]]:
        lengths = [len(s.token_ids) for s in self.samples]
        return microbatches(self.policy, rows, lengths, [s.prompt_ids for s in self.samples])

    def _chosen(self, rows: Sequence[int]) -> list[Sample]:
        return [self.samples[i] for i in rows] or [self.idle]

    def _begin(self, rows: Sequence[int]) -> Pass:
        """Forward, loss, and its gradient by the log-probabilities. Where few rows are expected to
        survive (update.py) no graph is built."""
        chosen = self._chosen(rows)
        inputs = self._inputs(chosen)
        thin = self._few_survive()
        draft = Draft(self.logprobs, inputs) if thin and self.reuses else None
        with torch.set_grad_enabled(not thin):
            logprobs_BT = draft.logprobs_BT if draft else self.logprobs(inputs)
        batch = make_batch(
            chosen,
            inputs,
            logprobs_BT.detach().requires_grad_(),
            self._start_logprobs(inputs) if self.regularised else None,
            self.divisors,
        )
        output = self.loss(batch, self.update) if rows else _no_loss(batch)
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
            self.scouting.append(begun)
            return later, 0
        draft, logprobs_BT, gradient_BT = begun.take()
        if begun.alive:
            kept, survived = self._survivors(begun)
            if draft and draft.usable:
                if kept:
                    inputs = self._inputs([begun.samples[b] for b in kept])
                    kept_BT = gradient_BT[to_device(torch.tensor(kept), self.device)]
                    width = inputs.reply_mask_BT.shape[1]
                    self._backward(draft.again(kept, inputs), kept_BT[:, :width])
                elif survived:  # other ranks have survivors
                    self._pass_again([], {})
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
        while self.scouting:
            one = self.scouting.pop()
            _, _, gradient_BT = one.take()
            later |= one.gradients(self._survivors(one)[0], gradient_BT)
        return later

    def _survivors(self, begun: Pass) -> tuple[list[int], float]:
        """The rows of a micro-batch that have a gradient, and their share of its tokens, which is what
        the next one is expected to have."""
        assert begun.alive is not None
        kept = [b for b, lives in enumerate(begun.alive.read()) if lives]
        counts = begun.inputs.layout.tokens_of(kept), begun.tokens if begun.rows else 0
        left, tokens = map(sum, zip(*self.policy.ranks.gather(counts), strict=True))
        self.expected.learn(left, tokens)
        return kept, left / tokens

    def _few_survive(self) -> bool:
        """Whether the next micro-batch is expected to leave so much out that its first forward should
        build no graph."""
        able = self.scouts or self.reuses
        return self.agent.prune and able and self.expected.share < THIN_BELOW[self.device.type]

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
            and self.policy.recordable
            and not self.agent.gradient_checkpointing
        )

    def _pass_again(self, rows: Sequence[int], gradients: Mapping[int, Tensor]) -> None:
        """Forward and backward of survivors, with the gradients of their first pass."""
        found = [gradients[i] for i in rows] or [torch.zeros(1, device=self.device)]
        gradient_BT = pad_sequence(found, batch_first=True)
        self._backward(self.logprobs(self._inputs(self._chosen(rows))), gradient_BT)

    def _backward(self, logprobs_BT: Tensor, gradient_BT: Tensor) -> None:
        logprobs_BT.backward(gradient_BT)

    def _inputs(self, samples: Sequence[Sample]) -> Inputs:
        return make_inputs(
            [s.token_ids for s in samples],
            [s.loss_mask for s in samples],
            self.policy.renderer.pad_id,
            self.device,
            share=self.logprobs.shares,
        )

    @torch.no_grad()
    def _start_logprobs(self, inputs: Inputs) -> Tensor:
        assert self.policy.start_logprobs is not None
        return self.policy.start_logprobs(inputs)


def _no_loss(batch: MicroBatch) -> LossOutput:
    """The loss of an empty micro-batch: zero, with a graph."""
    nothing = torch.zeros(0)
    return LossOutput((batch.logprobs_BT * 0.0).sum(), nothing, nothing.bool())
