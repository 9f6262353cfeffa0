"""One agent's weights: scoring, updating, saving.

On a GPU the resident weights are bfloat16 and a float32 master takes the optimizer's steps (a step
of 1e-6 vanishes in bfloat16); after every update it overwrites the resident tensors in place, so the
sampler, which holds the same tensors, needs no sync. On the CPU weights and master are one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.checkpoint import Snapshot
from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.policy.load import (
    choose_device,
    choose_dtype,
    load_model,
    load_renderer,
    model_source,
)
from hacrl.policy.logprobs import LogProbs, Rows, make_rows
from hacrl.policy.lora import adapter_off, add_adapter, merge_into
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.sampler import Sampler
from hacrl.policy.update import Loss, UpdateReport, repeat_pays, survivors
from hacrl.types import Batch, LossOutput, Sample, Update


class Policy:
    def __init__(self, agent: AgentConfig, *, device: str, temperature: float, beta: float) -> None:
        self.agent = agent
        self.device = choose_device(agent.device or device)
        dtype = choose_dtype(agent.dtype, self.device)
        self.source = model_source(agent.model, agent.name)
        model = load_model(self.source, agent)
        self.renderer = load_renderer(self.source, agent, model)
        self.context: int | None = getattr(model.config, "max_position_embeddings", None)
        """Longest sequence that the model was made for, where its config tells."""
        self.model = add_adapter(model, agent.lora) if agent.lora else model
        self.master = self._place(dtype)
        if agent.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.logprobs = LogProbs(self.model, temperature)
        self.sampler = Sampler(
            self.model, self.renderer.end_ids, self.renderer.pad_id, agent.sampler_rows
        )
        self.optimizer = torch.optim.AdamW(
            # A frozen member has nothing to train, and AdamW wants something.
            list(self.master.values()) or [torch.zeros(1)],
            lr=agent.learning_rate,
            betas=agent.betas,
            weight_decay=agent.weight_decay,
        )
        self.updates_made = 0
        self.skipped_in_a_row = 0
        self._kl = beta > 0 and agent.learns
        self._start: LogProbs | None = None  # a frozen second copy, unless an adapter can be off
        if self._kl and not agent.lora:
            frozen = copy.deepcopy(self.model).requires_grad_(False).eval()
            self._start = LogProbs(frozen, temperature)

    def _place(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Move the model to its device and dtype; the float32 master of what is trained."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.agent.learns:
            trained = {}
        if dtype == torch.float32:
            self.model.to(self.device)
            return trained
        masters = {
            n: p.detach().to(self.device, torch.float32, copy=True).requires_grad_()
            for n, p in trained.items()
        }
        self.model.to(device=self.device, dtype=dtype)
        return masters

    # ------------------------------------------------------------ scoring

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Token log-probabilities of each (prompt ids, reply ids) at the present weights."""
        scores: list[list[float]] = [[] for _ in sequences]
        for rows in plan_microbatches(
            [len(p) + len(r) for p, r in sequences], self.agent.microbatch_tokens
        ):
            logprobs_BT = self.logprobs(
                make_rows(
                    [[*sequences[i][0], *sequences[i][1]] for i in rows],
                    [[0] * len(sequences[i][0]) + [1] * len(sequences[i][1]) for i in rows],
                    self.renderer.pad_id,
                    self.device,
                )
            )
            for i, values in zip(rows, logprobs_BT.tolist(), strict=True):
                scores[i] = values[: len(sequences[i][1])]
        return scores

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
        for parameter in self.master.values():
            parameter.grad = None
        # transformers checkpoints in training mode only (dropout is 0), and has no cache in it
        self.model.train(self.agent.gradient_checkpointing)
        total, kl = 0.0, 0.0
        ratios: list[float | None] = [None] * len(samples)
        used: list[bool | None] = [None] * len(samples)
        skip = self.agent.prune and zero_advantage_is_zero_loss and not self._kl
        forward = [i for i, s in enumerate(samples) if s.advantage != 0 or not skip]
        repeat: dict[int, Tensor] = {}
        backward = 0
        for rows in self._microbatches(samples, forward):
            output, survived, done = self._pass(rows, samples, loss, update)
            repeat |= survived
            backward += done
            total += output.loss.item()
            kl += output.kl
            for i, ratio, kept in zip(
                rows, output.ratio_B.tolist(), output.used_B.tolist(), strict=True
            ):
                ratios[i], used[i] = ratio, kept
        for rows in self._microbatches(samples, list(repeat)):
            gradient_BT = pad_sequence([repeat[i] for i in rows], batch_first=True)
            self._backward(self.logprobs(self._rows([samples[i] for i in rows])), gradient_BT)
        self.model.eval()
        rate = self._learning_rate()
        norm = self._gradient_norm()
        finite = all(map(_finite, (total, norm)))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._write_back()
            self.updates_made += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return UpdateReport(
            loss=total,
            grad_norm=norm,
            kl=kl,
            skipped=not finite,
            ratios=tuple(ratios),
            used=tuple(used),
            learning_rate=rate,
            pruned_forward=len(samples) - len(forward),
            pruned_backward=len(forward) - backward - len(repeat),
        )

    def _microbatches(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[list[int]]:
        lengths = [len(samples[i].token_ids) for i in rows]
        planned = plan_microbatches(lengths, self.agent.microbatch_tokens)
        return [[rows[i] for i in batch] for batch in planned]

    def _pass(
        self, rows: Sequence[int], samples: Sequence[Sample], loss: Loss, update: Update
    ) -> tuple[LossOutput, dict[int, Tensor], int]:
        """Forward, loss, its gradient by the log-probabilities, and backward; how many rows took it.

        Where few rows survive (update.py) the graph is dropped, on return and so before the next is
        built, and the survivors' gradients are returned instead, for a pass of their own.
        """
        tensors = self._rows([samples[i] for i in rows])
        logprobs_BT = self.logprobs(tensors)
        batch = self._batch(
            tensors, logprobs_BT.detach().requires_grad_(), [samples[i] for i in rows], samples
        )
        output = loss(batch, update)
        (gradient_BT,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
        if self.agent.prune:
            alive = survivors(gradient_BT, batch.mask_BT)
            if repeat_pays([len(samples[i].token_ids) for i in rows], alive):
                gradients = {
                    i: gradient_T[: samples[i].num_reply_tokens]
                    for i, gradient_T, kept in zip(rows, gradient_BT, alive, strict=True)
                    if kept
                }
                return output, gradients, 0
        self._backward(logprobs_BT, gradient_BT)
        return output, {}, len(rows)

    def _backward(self, logprobs_BT: Tensor, gradient_BT: Tensor) -> None:
        logprobs_BT.backward(gradient_BT)
        self._gather_gradients()

    def _rows(self, samples: Sequence[Sample]) -> Rows:
        return make_rows(
            [s.token_ids for s in samples],
            [s.loss_mask for s in samples],
            self.renderer.pad_id,
            self.device,
        )

    def _batch(
        self,
        tensors: Rows,
        logprobs_BT: Tensor,
        rows: Sequence[Sample],
        minibatch: Sequence[Sample],
    ) -> Batch:
        def column(values: Sequence[float | None]) -> Tensor:
            filled = [float("nan") if v is None else v for v in values]
            return torch.tensor(filled, dtype=torch.float32, device=self.device)

        def grid(rows_of_tokens: Sequence[Sequence[float] | None]) -> Tensor | None:
            """Tokens' values in rows padded with 0; None where a row has none."""
            filled_BT = torch.zeros_like(tensors.reply_mask_BT)
            for i, values in enumerate(rows_of_tokens):
                if values is None:
                    return None
                filled_BT[i, : len(values)] = torch.tensor(values)
            return filled_BT

        return Batch(
            logprobs_BT=logprobs_BT,
            mask_BT=tensors.reply_mask_BT,
            behaviour_B=column([s.behaviour for s in rows]),
            old_logprobs_BT=grid([s.old_logprobs for s in rows]),
            ref_logprobs_BT=self._start_logprobs(tensors) if self._kl else None,
            advantage_B=column([s.advantage for s in rows]),
            weight_B=column([s.weight for s in rows]),
            is_own_B=torch.tensor([s.is_own for s in rows], device=self.device),
            num_samples=len(minibatch),
            num_own=sum(s.is_own for s in minibatch),
            num_tokens=sum(s.num_reply_tokens for s in minibatch),
            num_own_tokens=sum(s.num_reply_tokens for s in minibatch if s.is_own),
            source_logprobs_BT=grid([s.source_logprobs for s in rows]),
        )

    @torch.no_grad()
    def _start_logprobs(self, rows: Rows) -> Tensor:
        """At the start weights, for the KL term."""
        if self._start is not None:
            return self._start(rows)
        with adapter_off(self.model):
            return self.logprobs(rows)

    def _resident(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of (resident tensor, master) where the two are not one."""
        for name, parameter in self.model.named_parameters():
            master = self.master.get(name)
            if master is not None and master is not parameter:
                yield parameter, master

    def _gather_gradients(self) -> None:
        """Sum bfloat16 gradients in float32, micro-batch by micro-batch."""
        for parameter, master in self._resident():
            if parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None

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

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in self._resident():
            parameter.copy_(master)

    def _learning_rate(self) -> float:
        """Of the next update: rising over the warm-up, then constant."""
        warmup = self.agent.warmup_updates
        return self.agent.learning_rate * min(1.0, (self.updates_made + 1) / max(warmup, 1))

    # ------------------------------------------------------------ saving

    def snapshot(self, step: int) -> Snapshot:
        """Everything that a resumed agent needs; the pool and the journal hold the rest."""
        names = list(self.master)
        moments: dict[str, Tensor] = {}
        for name, parameter in self.master.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{key}/{name}"] = torch.as_tensor(value).detach().cpu().clone()
        return Snapshot(
            step=step,
            model={n: self.master[n].detach().cpu().clone().contiguous() for n in names},
            optimizer=moments,
            state={"updates_made": self.updates_made, "skipped_in_a_row": self.skipped_in_a_row},
        )

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        if set(snapshot.model) != set(self.master):
            raise UserError(
                f"agent {self.agent.name!r}: the checkpoint of step {snapshot.step} holds other "
                "tensors than the model of the config; it belongs to another model."
            )
        for name, parameter in self.master.items():
            parameter.copy_(snapshot.model[name])
            state = {
                key: snapshot.optimizer[f"{key}/{name}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}/{name}" in snapshot.optimizer
            }
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key] = state[key].to(parameter.device)
            if state:
                self.optimizer.state[parameter] = state
        self._write_back()
        self.updates_made = int(snapshot.state["updates_made"])
        self.skipped_in_a_row = int(snapshot.state["skipped_in_a_row"])

    def export(self, folder: Path) -> None:
        """An ordinary model folder: whole weights (an adapter merged), tokenizer, chat template."""
        model = self.model
        if self.agent.lora:
            model = merge_into(load_model(self.source, self.agent), self.model)
        model.save_pretrained(folder)
        self.renderer.tokenizer.chat_template = (
            self.renderer.template
        )  # the one it was trained with
        self.renderer.tokenizer.save_pretrained(folder)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
