"""An agent's weights: how they are loaded, held, and saved.

On a GPU the resident weights are bfloat16 and a float32 master takes the optimizer's steps (a step
of 1e-6 vanishes in bfloat16); after every update it overwrites the resident tensors in place, so the
sampler, which holds the same tensors, needs no sync. On the CPU weights and master are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.policy.load import (
    choose_device,
    choose_dtype,
    load_model,
    load_renderer,
    longest_sequence,
    model_source,
    move_model,
)
from hacrl.policy.lora import add_adapter, merge_into
from hacrl.store.checkpoint import Checkpoint


class Weights:
    """The model, the master of what is trained, and the optimizer that steps it."""

    def __init__(self, agent: AgentConfig, device: str) -> None:
        self.agent = agent
        self.device = choose_device(agent.device or device)
        dtype = choose_dtype(agent.dtype, self.device)
        self.source = model_source(agent.model, agent.name)
        model = load_model(self.source, agent)
        self.renderer = load_renderer(self.source, agent, model)
        self.context = longest_sequence(model.config)
        """Longest sequence that the model was made for, where its config tells."""
        self.model = add_adapter(model, agent.lora) if agent.lora else model
        self.network: Any = self.model
        """What takes gradients: the model itself, or its shards (sharding/)."""
        self.master = self._place(dtype)
        self.optimizer = torch.optim.AdamW(
            # A frozen member has nothing to train, and AdamW wants something.
            list(self.master.values()) or [torch.zeros(1)],
            lr=agent.learning_rate,
            betas=agent.betas,
            weight_decay=agent.weight_decay,
            foreach=False,  # tensor by tensor: no temporaries of the whole model's size
        )
        self.updates_made = 0
        self.skipped_in_a_row = 0
        self.survived: dict[str, float] = {}
        """Of the last update of own rows, of peers', or of both: of the tokens that went forward, the
        share of rows with a gradient."""

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
        move_model(self.model, self.device, dtype)
        return masters

    @property
    def half(self) -> bool:
        """Whether the model computes in half precision."""
        return next(self.model.parameters()).dtype.itemsize < 4

    # ------------------------------------------------------------ master and resident weights

    def _resident(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of (resident tensor, master) where the two are not one."""
        for name, parameter in self.model.named_parameters():
            master = self.master.get(name)
            if master is not None and master is not parameter:
                yield parameter, master

    def _gather_gradients(self) -> None:
        """Have each bfloat16 gradient added to the master's float32 one as it comes, and let go."""

        def into(master: Tensor) -> Callable[[Tensor], None]:
            def add(parameter: Tensor) -> None:
                assert parameter.grad is not None
                if master.grad is None:
                    master.grad = parameter.grad.float()
                else:
                    master.grad += parameter.grad
                parameter.grad = None

            return add

        for parameter, master in self._resident():
            parameter.register_post_accumulate_grad_hook(into(master))

    def _weights_changed(self) -> None:
        """The master has, by an update or from a checkpoint."""
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in self._resident():
            parameter.copy_(master)

    # ------------------------------------------------------------ saving

    def snapshot(self, step: int) -> Checkpoint:
        """Everything that a resumed agent needs; the pool and the journal hold the rest."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self.master.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{key}/{name}"] = self._whole(torch.as_tensor(value))
        return Checkpoint(
            step=step,
            model={name: self._whole(master) for name, master in self.master.items()},
            optimizer=moments,
            state={
                "updates_made": self.updates_made,
                "skipped_in_a_row": self.skipped_in_a_row,
                "survived": dict(self.survived),
            },
        )

    def check_names(self, snapshot: Checkpoint) -> None:
        if set(snapshot.model) != set(self.master):
            raise UserError(
                f"agent {self.agent.name!r}: the checkpoint of step {snapshot.step} holds other "
                "tensors than the model of the config; it belongs to another model."
            )

    @torch.no_grad()
    def restore(self, snapshot: Checkpoint) -> None:
        self.check_names(snapshot)
        for name, parameter in self.master.items():
            parameter.copy_(self._part(parameter, snapshot.model[name]))
            state = {}
            if f"step/{name}" in snapshot.optimizer:
                state["step"] = snapshot.optimizer[f"step/{name}"].clone()
            for key in ("exp_avg", "exp_avg_sq"):
                if f"{key}/{name}" in snapshot.optimizer:
                    state[key] = self._part(parameter, snapshot.optimizer[f"{key}/{name}"])
            if state:
                self.optimizer.state[parameter] = state
        self._weights_changed()
        self.updates_made = int(snapshot.state["updates_made"])
        self.skipped_in_a_row = int(snapshot.state["skipped_in_a_row"])
        self.survived = dict(snapshot.state.get("survived", {}))

    def _whole(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of all shards together."""
        return tensor.detach().cpu().clone().contiguous()

    def _part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """What of a whole tensor belongs with this parameter, on its device; a copy."""
        return whole.to(parameter.device, copy=True)

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
