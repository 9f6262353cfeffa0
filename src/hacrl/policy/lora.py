"""Low-rank adapters through peft, inside the model's own layers.

The model's class does not change, so scoring and sampling need no special case. The start weights for
the KL term are the same model with the adapters switched off: no second copy.
"""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacrl.config_agent import LoraSettings
from hacrl.errors import UserError


def add_adapter(model: Any, settings: LoraSettings) -> Any:
    """The model with adapters in its layers; only these are trained."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("lora needs peft: pip install 'hacrl[lora]'") from error
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = ends[1] is not None and ends[0].weight is ends[1].weight
    torch.manual_seed(0)  # peft initialises A randomly: every run starts from the same weights
    try:
        model = inject_adapter_in_model(
            LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha or 2 * settings.rank,
                lora_dropout=0.0,  # sampler and trainer must be the same function
                target_modules=settings.targets,
                task_type="CAUSAL_LM",
            ),
            model,
        )
    except ValueError as error:
        raise UserError(f"lora.targets = {settings.targets!r}: {error}") from error
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if is_tied and any(hasattr(end, "base_layer") for end in ends):
        raise UserError(
            f"lora.targets = {settings.targets!r}: input embeddings and output head of this model are "
            "one tensor, which cannot have an adapter on one side only. Leave both out"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def save_adapter(model: Any, base: str, folder: Path) -> None:
    """Write the adapter of a model from `add_adapter` as `PeftModel.save_pretrained` does."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    (config,) = model.peft_config.values()
    config = deepcopy(config)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)
    tensors = get_peft_model_state_dict(model)
    named = {
        f"base_model.model.{name}": t.detach().cpu().contiguous() for name, t in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})


def adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@contextlib.contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """The model has its start weights inside the block."""
    for _, layer in adapter_layers(model):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in adapter_layers(model):
            layer.enable_adapters(True)


def _adapted(layer: Any) -> str:
    """The name of the tensor that the adapter changes. The experts of a mixture are one module with
    several tensors, and every tensor has its own layer around the one before."""
    return getattr(layer, "parameter_name", "weight")


@torch.no_grad()
def merge_into(base: Any, model: Any) -> Any:
    """Add the adapters of `model` to `base`, a fresh copy of the start weights."""
    for name, layer in adapter_layers(model):
        owner = base.get_submodule(name.replace(".base_layer", ""))
        weight = getattr(owner, _adapted(layer))
        for adapter in layer.active_adapters:
            weight += layer.get_delta_weight(adapter).to(weight.device, weight.dtype)
    return base


@torch.no_grad()
def merged_weights(model: Any, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name without adapters, with the adapters added; tied tensors once.

    One tensor at a time, so that there is no second copy of the model. `merge=False` leaves the
    adapters out.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if "lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        owner, adapted, rest = name.partition(".base_layer.")
        if not adapted:
            yield name, tensor.detach()
            continue
        leaf = rest.rpartition("base_layer.")[2]
        weight = tensor.detach()
        layer = model.get_submodule(owner)
        while hasattr(layer, "base_layer"):
            if merge and leaf == _adapted(layer):
                for adapter in layer.active_adapters:
                    # in float32, so that the sum is rounded once
                    weight = weight.float() + layer.get_delta_weight(adapter).float()
            layer = layer.base_layer
        yield f"{owner}.{leaf}", weight.to(tensor.dtype)
