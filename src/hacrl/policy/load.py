"""Loading a causal language model and its tokenizer: a folder, a hub name, or pocket:NAME."""

from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hacrl.config import AgentConfig
from hacrl.errors import UserError, first_line
from hacrl.importing import remote_code
from hacrl.pocket import pocket_path
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

HUB_SECONDS = 5.0  # how long the hub has to answer


def choose_device(wanted: str) -> torch.device:
    """auto: the GPU if there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UserError(
            f"device = {wanted!r} is not a device. Use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {wanted!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device = {wanted!r}, but torch sees no GPU here. Use device = 'cpu'.")
    return device


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """auto: float32 on the CPU, bfloat16 (with a float32 master) on a GPU."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def model_source(model: str, agent: str) -> str:
    """The folder or hub name to load from. Raises `UserError` for a missing folder."""
    if model.startswith("pocket:"):
        return str(pocket_path(model.removeprefix("pocket:")))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"agent {agent!r}: {folder} has no config.json, so it is not a model folder. "
                "Give a folder written by save_pretrained."
            )
        return str(folder)
    if folder.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise UserError(
            f"agent {agent!r}: the model folder {model} does not exist. Give an existing folder, "
            "a hub name like Qwen/Qwen3-1.7B-Base, or pocket:NAME."
        )
    return model


def find_model(model: str, agent: str) -> str:
    """Like `model_source`, but if the hub does not answer, the model's folder in the local cache.
    Without this, huggingface_hub would try again for half a minute for each file."""
    source = model_source(model, agent)
    if Path(source).is_dir():
        return source
    try:
        huggingface_hub.model_info(source, timeout=HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        pass  # the hub answers, or the name is wrong: loading says so
    except Exception as error:
        cached = huggingface_hub.try_to_load_from_cache(source, "config.json")
        if not isinstance(cached, str):
            raise UserError(
                f"agent {agent!r}: model = {model!r} is neither a folder nor in the local cache, and "
                f"the hub cannot be reached ({first_line(error)}). Check the network, or give a folder."
            ) from error
        return str(Path(cached).parent)
    return source


def end_tokens(model: Any, tokenizer: Any) -> list[int] | None:
    """All tokens that end a reply: those of the generation config and of the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    ids = [i for i in [*listed, tokenizer.eos_token_id] if i is not None]
    return sorted(set(ids)) or None


def load_model(source: str, agent: AgentConfig) -> Any:
    """The model in float32 on the CPU; the policy moves and casts it."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code(agent))
        for name, value in list(vars(config).items()):
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)  # sampler and trainer must be the same function
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            attn_implementation=agent.attention,
            trust_remote_code=remote_code(agent),
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"agent {agent.name!r}: no causal language model can be loaded from {source} "
            f"({first_line(error)}). Give a folder with config.json and safetensors weights, or a "
            "hub name that this machine can reach."
        ) from error
    _make_savable(model)
    return model.eval()


def _make_savable(model: Any) -> None:
    """Change what `save_pretrained` refuses in the generation config: published ones contain it."""
    found = model.generation_config
    if found is None:
        return
    if (found.pad_token_id or 0) < 0:
        found.pad_token_id = None
    try:
        found.validate(strict=True)
    except ValueError:
        found.do_sample = True  # a temperature or top_p without it


def longest_sequence(config: Any) -> int | None:
    """The model's context length, if its config has one. With longrope it is the original length: a
    longer sequence switches the rotary frequencies of its whole batch, and a row would depend on other
    rows."""
    config = config.get_text_config()  # of a model that also reads images
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    if rope.get("rope_type") == "longrope":
        limits.append(rope.get("original_max_position_embeddings"))
    return min((n for n in limits if n), default=None)


def move_model(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Move to a device and dtype, with the result of `from_pretrained(dtype=...)`: buffers that are not
    saved with the weights keep their dtype. Rotary frequencies are such buffers; in bfloat16 they would
    rotate tokens at position 1000 by the wrong angle. Tensors that the model's class
    keeps in float32 keep it too, e.g. biases that a router compares."""
    exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    saved = {name for name in model.state_dict() if not any(part in name for part in exact)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    model.to(device)


def load_renderer(source: str, agent: AgentConfig, model: Any) -> Renderer:
    settings = RenderSettings(agent.system, agent.template, agent.template_args, agent.reply_start)
    try:
        tokenizer = load_tokenizer(source, trust_remote_code=remote_code(agent))
        renderer = Renderer(tokenizer, settings, end_tokens(model, tokenizer))
    except UserError as error:
        raise UserError(f"agent {agent.name!r}: {error}") from error
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings and renderer.pad_id >= len(embeddings().weight):  # added to the tokenizer only
        renderer.pad_id = 0
    return renderer
