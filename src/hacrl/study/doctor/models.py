"""What a model folder says without loading its weights: renderer and context length."""

import json
from pathlib import Path
from typing import Any

from hacrl.config import AgentConfig
from hacrl.importing import remote_code
from hacrl.policy.load import longest_sequence
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer


def make_renderer(agent: AgentConfig, source: str) -> Renderer:
    """The renderer that the agent will have; UserError if its tokenizer or template does not work."""
    tokenizer = load_tokenizer(source, trust_remote_code=remote_code(agent))
    settings = RenderSettings(agent.system, agent.template, agent.template_args, agent.reply_start)
    return Renderer(tokenizer, settings, _end_ids(Path(source), tokenizer))


def context_length(agent: AgentConfig, source: str) -> int | None:
    """The longest sequence that the model reads, if its config says so."""
    from transformers import AutoConfig

    return longest_sequence(
        AutoConfig.from_pretrained(source, trust_remote_code=remote_code(agent))
    )


def _end_ids(folder: Path, tokenizer: Any) -> list[int] | None:
    """The end tokens that the folder and its tokenizer name, without loading the model."""
    named: list[Any] = [tokenizer.eos_token_id]
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            named += value if isinstance(value, list) else [value]
    return sorted({i for i in named if i is not None}) or None
