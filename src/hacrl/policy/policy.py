"""One agent's policy: scoring and updating. What it is made of is in weights.py."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.policy.batch import divisors_of, make_batch
from hacrl.policy.logprobs import Inputs, LogProbs, make_inputs
from hacrl.policy.lora import adapter_off
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.offload import Turns
from hacrl.policy.packing import attending_again, placed
from hacrl.policy.reuse import Draft, recordable
from hacrl.policy.sampling.samplers import AnySampler, make_sampler
from hacrl.policy.update import (
    DRAFT_BELOW,
    DRAFT_KEEPS,
    DRAFT_TOKENS,
    Arriving,
    AtScores,
    Expected,
    Loss,
    Pass,
    Sums,
    UpdateReport,
    repeat_pays,
    share,
    survivors,
)
from hacrl.policy.weights import Weights
from hacrl.types import LossOutput, Sample, Update


class Policy(Weights):
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
        self.sampler: AnySampler = make_sampler(self, sampler or SamplerConfig())
        self._scored_step: int | None = None
        """Whose own replies carry scores of the present weights; None once these have changed."""
        # A frozen second copy, unless an adapter can be off.
        self._start: LogProbs | None = None
        if self._kl and not agent.lora:
            self._start = self._scorer(self._frozen_copy(), temperature)
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
        for rows in self._rounds(self._planned([len(p) + len(r) for p, r in sequences])):
            if not rows:
                self._idle_forward()
                continue
            logprobs_BT = self.logprobs(
                make_inputs(
                    [[*sequences[i][0], *sequences[i][1]] for i in rows],
                    [[0] * len(sequences[i][0]) + [1] * len(sequences[i][1]) for i in rows],
                    self.renderer.pad_id,
                    self.device,
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
        *,
        zero_advantage_is_zero_loss: bool = False,
    ) -> UpdateReport:
        """One parameter update on a minibatch, in micro-batches whose losses add up to its loss.

        With `prune`, exact zeros make no work: rows without gradient take no backward, and rows of
        advantage 0 no forward where the algorithm says that they add nothing. Divisors and the
        optimizer's step are as if they had been there.
        """
        sums = self._accumulate(
            samples, range(len(samples)), loss, update, zero_advantage_is_zero_loss
        )
        rate = self._learning_rate()
        norm = self._gradient_norm()
        finite = all(map(_finite, (sums.loss, norm)))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._weights_changed()
            self.updates_made += 1
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
        *,
        zero_advantage_is_zero_loss: bool = False,
    ) -> dict[str, Tensor]:
        """What the samples `rows` of a minibatch add to its gradient at the present weights, before
        any clipping. For diagnostics: weights, optimizer and counts stay as they are."""
        self._accumulate(samples, rows, loss, update, zero_advantage_is_zero_loss)
        found = {}
        for name, parameter in self.master.items():
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
        return found

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
        self._expected, self._divisors = Expected(update), divisors_of(samples)
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
        return Sums(
            loss=total,
            kl=kl,
            ratios=tuple(ratios),
            used=tuple(used),
            pruned_forward=len(chosen) - len(forward),
            pruned_backward=len(forward) - backward - len(repeat),
        )

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
        return self._rounds([[rows[i] for i in batch] for batch in self._planned(lengths, part)])

    def _planned(self, lengths: Sequence[int], part: float = 1.0) -> list[list[int]]:
        """Micro-batches of `microbatch_tokens`, or of this part of them."""
        tokens = max(1, int(part * self.agent.microbatch_tokens))
        return plan_microbatches(lengths, tokens, padded=not self.logprobs.packs)

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
        while their pass is prepared, the next draft is begun before. Two of them are more than one
        graph, so they are smaller; the first of an update is finished first, as how many survive is
        not known yet.
        """
        ahead = self.works_ahead and self._drafts()
        batches = deque(self._microbatches(samples, rows, DRAFT_TOKENS if ahead else 1.0))
        waiting: Pass | None = None
        while batches:
            if (
                ahead and not self._drafts()
            ):  # nearly all survive: graphs, each of full size and alone
                ahead = False
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
            if not (ahead and small and begun.draft and self._expected.seen):
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
        """Backward; how many rows took it. Where fewer survive than expected the graph is dropped, and
        the survivors' gradients are returned instead, for a pass of their own."""
        draft, logprobs_BT, gradient_BT = begun.take()
        if begun.alive:
            alive = begun.alive.read()
            survived = self._survived(begun.inputs.lengths, alive)
            self._expected.learn(survived)
            kept = [b for b, lives in enumerate(alive) if lives]
            if draft and draft.usable and self._fits(begun, kept):
                if kept:
                    again = self._inputs([begun.samples[b] for b in kept])
                    kept_BT = gradient_BT[placed(torch.tensor(kept), self.device)]
                    width = again.reply_mask_BT.shape[1]
                    self._backward(draft.again(kept, again), kept_BT[:, :width])
                elif survived:  # other ranks have survivors
                    self._pass_again([], [], {})
                return {}, len(kept)
            if draft or repeat_pays(survived, self.agent.gradient_checkpointing):
                lengths = [begun.samples[b].num_reply_tokens for b in kept]
                return {
                    begun.rows[b]: gradient_BT[b, :n] for b, n in zip(kept, lengths, strict=True)
                }, 0
        self._backward(logprobs_BT, gradient_BT)
        return {}, len(begun.rows)

    def _fits(self, begun: Pass, kept: Sequence[int]) -> bool:
        """Whether a graph of these rows and the draft beside it keep no more than a graph may."""
        tokens = sum(begun.inputs.lengths[b] for b in kept)
        return (
            tokens + DRAFT_KEEPS * begun.beside <= self.agent.microbatch_tokens or not begun.beside
        )

    def _drafts(self) -> bool:
        """Whether the next micro-batch is expected to leave so much out that its first forward should
        build no graph. Checkpointing keeps nothing that could be used again."""
        return (
            self.agent.prune
            and self.logprobs.packs
            and self.logprobs.plain_head
            and self._recordable
            and not self.agent.gradient_checkpointing
            and self._expected.share < DRAFT_BELOW
        )

    def _survived(self, lengths: Sequence[int], alive: Sequence[bool]) -> float:
        """Survivors' part of the tokens, on all ranks together: each must go the same way."""
        return share(lengths, alive)

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
