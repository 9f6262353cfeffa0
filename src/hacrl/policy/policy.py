"""One agent's policy: a model that scores, samples and learns.

An update: split the minibatch into micro-batches, forward, loss and backward of each (gradients.py),
clip the gradient, step the optimizer, copy the new weights into the model.
"""

from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hacrl.config import AgentConfig, SamplerConfig
from hacrl.errors import UserError
from hacrl.policy.batch import make_inputs
from hacrl.policy.gradients import accumulate_gradient, microbatches
from hacrl.policy.load import (
    choose_device,
    find_model,
    load_model,
    load_renderer,
    longest_sequence,
)
from hacrl.policy.lora import add_adapter, merge_into, save_adapter
from hacrl.policy.offload import Offloader
from hacrl.policy.ranks import OneRank
from hacrl.policy.update import Loss, UpdateReport, WithoutRounding, merge_rows
from hacrl.sampling.base import Sampler, make_sampler
from hacrl.stopping import check
from hacrl.store.checkpoint import Checkpoint
from hacrl.types import Sample, Update


class Policy:
    """A model with its optimizer and its sampler.

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
        ranks: OneRank | None = None,
    ) -> None:
        """`beta` > 0: the loss has a KL term, so the start weights are kept. `ranks` are the processes
        that hold the policy; by default this one alone."""
        self.agent = agent
        self.ranks = ranks or OneRank()
        self.device = choose_device(agent.device or device)
        self.source = find_model(agent.model, agent.name)
        model = load_model(self.source, agent)
        self.renderer = load_renderer(self.source, agent, model)
        self.context = longest_sequence(model.config)
        """Longest sequence that the model supports, if its config has a limit."""
        self.model = add_adapter(model, agent.lora) if agent.lora else model
        weights = self.ranks.place(
            self.model, agent, self.device, temperature, keep_start=beta > 0 and agent.learns
        )
        self.network, self.master = weights.network, weights.master
        self.logprobs, self.start_logprobs = weights.logprobs, weights.start_logprobs
        self.start_model = weights.start_model
        self.optimizer = torch.optim.AdamW(
            # AdamW rejects an empty list; an agent that does not learn has no master.
            list(self.master.values()) or [torch.zeros(1)],
            lr=agent.learning_rate,
            betas=agent.betas,
            weight_decay=agent.weight_decay,
            foreach=False,  # it would need temporaries of the model's size
            fused=self.device.type == "cuda",  # one kernel for many tensors
        )
        self.sampler: Sampler = make_sampler(self, sampler or SamplerConfig())
        self.offloader = Offloader(
            self.device,
            agent.offload if self.ranks.size == 1 else "none",  # shards stay on their device
            self.model,
            self.master,
            self.optimizer,
            self.start_model,
        )
        self.updates_made = 0
        self.skipped_in_a_row = 0
        self._scored_step: int | None = None
        """Step whose own replies carry scores of the present weights; None once the weights change."""
        self._rounding = 0.0

    @property
    def half(self) -> bool:
        """Whether the model computes in half precision."""
        return next(self.model.parameters()).dtype.itemsize < 4

    # ------------------------------------------------------------ scoring

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Token log-probabilities of each (prompt ids, reply ids) at the current weights."""
        prompts = [tuple(p) if r else () for p, r in sequences]
        lengths = [len(p) + len(r) for p, r in sequences]
        computed: list[tuple[list[int], Tensor]] = []
        mine = self.ranks.split(prompts, lengths)
        for rows in microbatches(self, mine, lengths, prompts):
            check()
            pairs = [sequences[i] for i in rows] or [((self.renderer.pad_id,),) * 2]
            inputs = make_inputs(
                [[*prompt, *reply] for prompt, reply in pairs],
                [[0] * len(prompt) + [1] * len(reply) for prompt, reply in pairs],
                self.renderer.pad_id,
                self.device,
                share=self.logprobs.shares,
            )
            computed.append((rows, self.logprobs(inputs)))
        scores: list[list[float] | None] = [None] * len(sequences)
        for rows, logprobs_BT in computed:  # read after the last forward: reading waits for the GPU
            for i, values in zip(rows, logprobs_BT.tolist(), strict=False):
                scores[i] = values[: len(sequences[i][1])]
        return merge_rows(self.ranks.gather(scores))

    def has_scored(self, step: int) -> bool:
        """Whether the scores of the step's own replies are those of the present weights."""
        return self._scored_step == step

    def mark_scored(self, step: int, rounding: float) -> None:
        """Record that the step's own replies carry the scores of the present weights, and the standard
        deviation of a token's rounding."""
        self._scored_step, self._rounding = step, rounding

    def without_rounding(self, loss: Loss, step: int) -> Loss:
        """The loss for an update of the step. In half precision it ignores changes within rounding, and
        all changes while the weights are those that scored. In float32 it is the loss itself."""
        if not self.half:
            return loss
        return WithoutRounding(loss, inf if self.has_scored(step) else self._rounding)

    # ------------------------------------------------------------ learning

    def update(self, samples: Sequence[Sample], loss: Loss, update: Update) -> UpdateReport:
        """One optimizer step on a minibatch, in micro-batches whose losses add up to its loss.

        Rows of advantage 0 are skipped unless there is a KL term. Divisors and the optimizer step are
        the same as with these rows.
        """
        self.offloader.begin_update()
        sums = accumulate_gradient(self, samples, range(len(samples)), loss, update)
        rate = self.learning_rate(update.rate)
        norm = self._clip_gradient()
        finite = isfinite(sums.loss) and isfinite(norm)
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
            ratios=tuple(sums.ratios),
            weights=tuple(sums.weights),
            learning_rate=rate,
        )

    def gradient(
        self, samples: Sequence[Sample], rows: Sequence[int], loss: Loss, update: Update
    ) -> dict[str, Tensor]:
        """The part of a minibatch's gradient that comes from the samples `rows`, not clipped. For
        diagnostics: weights, optimizer and counters do not change."""
        self.offloader.begin_update()
        accumulate_gradient(self, samples, rows, loss, update)
        found = {}
        for name, parameter in self.master.items():
            zero = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = self.ranks.full(zero.detach())
            parameter.grad = None
        return found

    def _clip_gradient(self) -> float:
        """Scale the gradient down to `max_grad_norm`; returns its norm before that.

        A parameter that no row reached gets a gradient of zero. Without one the optimizer would skip it,
        and its step would depend on which rows were skipped.
        """
        parameters = list(self.master.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self.ranks.full(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        clip_grads_with_norm_(parameters, self.agent.max_grad_norm, norm)
        return norm.item()

    def learning_rate(self, factor: float = 1.0) -> float:
        """Of the next update: linear warm-up, then constant, times the factor of the schedule."""
        warmup = self.agent.warmup_updates
        rate = self.agent.learning_rate * min(1.0, (self.updates_made + 1) / max(warmup, 1))
        return rate * factor

    def _weights_changed(self) -> None:
        """Called after the master changed, by an update or from a checkpoint."""
        self._write_back()
        self.sampler.weights_changed()
        self._scored_step = None

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy the master into the model, where the two are different tensors."""
        for name, parameter in self.model.named_parameters():
            master = self.master.get(name)
            if master is not None and master is not parameter:
                parameter.copy_(self.ranks.full(master, parameter.dtype))

    def offload(self) -> None:
        """Drop gradients, and move what only updates need to the host if the agent's `offload` setting
        says so. Called after the last update of a step."""
        self.offloader.end_updates()

    # ------------------------------------------------------------ checkpoints

    def checkpoint(self, step: int) -> Checkpoint:
        """Everything that a resumed agent needs, except the journal and the pool."""
        return Checkpoint(
            step=step,
            model={name: self._on_host(master) for name, master in self.master.items()},
            optimizer={name: self._on_host(t) for name, t in self.optimizer_tensors().items()},
            state={"updates_made": self.updates_made, "skipped_in_a_row": self.skipped_in_a_row},
        )

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as KEY/PARAMETER: tensor; of a sharded parameter this rank's shard.

        Example: policy.optimizer_tensors()["exp_avg_sq/lm_head.weight"]
        """
        return {
            f"{key}/{name}": torch.as_tensor(value)
            for name, parameter in self.master.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def _on_host(self, tensor: Tensor) -> Tensor:
        return self.ranks.full(tensor.detach()).cpu().clone().contiguous()

    def check_names(self, checkpoint: Checkpoint) -> None:
        """Raise `UserError` if the checkpoint is of another model."""
        if set(checkpoint.model) != set(self.master):
            raise UserError(
                f"agent {self.agent.name!r}: the checkpoint of step {checkpoint.step} has different "
                "tensor names than the configured model; it belongs to another model. Set the agent's "
                "`model` (and `lora`) to what the run was started with."
            )

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: weights, optimizer state and counters."""
        self.check_names(checkpoint)
        for name, parameter in self.master.items():
            parameter.copy_(self.ranks.shard(parameter, checkpoint.model[name]))
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                stored = checkpoint.optimizer.get(f"{key}/{name}")
                if stored is not None:
                    state[key] = (
                        stored.to(self.device, copy=True)
                        if key == "step"
                        else self.ranks.shard(parameter, stored)
                    )
            if state:
                self.optimizer.state[parameter] = state
        self._weights_changed()
        self.updates_made = int(checkpoint.state["updates_made"])
        self.skipped_in_a_row = int(checkpoint.state["skipped_in_a_row"])

    def export(self, folder: Path, adapter: bool = False) -> None:
        """Write an ordinary model folder: full weights (adapters merged), tokenizer, chat template.
        `adapter`: the weights of the adapter alone, in the form of peft."""
        model = self.model
        if adapter:
            save_adapter(model, str(self.source), folder)
        else:
            if self.agent.lora:
                model = merge_into(load_model(self.source, self.agent), model)
            model.save_pretrained(folder)
        tokenizer = self.renderer.tokenizer
        tokenizer.chat_template = self.renderer.template  # the template used in training
        tokenizer.save_pretrained(folder)
