"""Models of known shapes with random weights, and policies around them: no files, no downloads.

Their vocabulary is words " t0", " t1", ...: any ids are text and come back from it as they were, so
whole steps run on them, samples of peers included. The end token lies outside of what the models can
write: a reply ends at its limit and nowhere else.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import hacrl.policy.policy as policy_module
from hacrl.config import AgentConfig
from hacrl.policy.policy import Policy
from hacrl.text.render import Renderer, RenderSettings

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
END = "<end>"
PAD = 0


def _qwen3(
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    inner: int,
    size: int = 128,
    vocabulary: int = 151936,
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=size,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )


SHAPES: dict[str, Any] = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144),
    "Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728),
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=1e5,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "Gemma3-270M": Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "small-4M": _qwen3(256, 4, 4, 2, 768, 64, 4096),
    "small-1M": _qwen3(128, 3, 2, 1, 384, 64, 4096),
    "tiny-a": _qwen3(32, 2, 2, 1, 64, 32, 512),  # vLLM's CPU kernels need heads of at least 32
    "tiny-b": _qwen3(48, 2, 2, 1, 96, 32, 512),
}


def vocabulary_of(shape: str) -> int:
    return SHAPES[shape].vocab_size


def build_model(shape: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, the same for the same shape."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def make_tokenizer(shape: str) -> PreTrainedTokenizerFast:
    size = vocabulary_of(shape)
    words = {f" t{i}": i for i in range(size)} | {END: size}
    backend = Tokenizer(models.WordLevel(words, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" t\d+"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def text_of(ids: Sequence[int]) -> str:
    return "".join(f" t{i}" for i in ids)


def make_renderer(shape: str) -> Renderer:
    renderer = Renderer(make_tokenizer(shape), RenderSettings(), [vocabulary_of(shape)])
    renderer.pad_id = PAD  # an id that the model has a row for; it only fills
    return renderer


def make_policy(shape: str, device: torch.device, name: str = "bench", **fields: Any) -> Policy:
    """hacrl's policy as a run makes it, around a model that comes from no folder.

    The learning rate is too small to move anything: every repetition is the same work, and what the
    clips leave out is what the benchmark set.
    """
    agent = AgentConfig(name=name, model="bench/shape", learning_rate=1e-30, **fields)
    with (
        patch.object(policy_module, "find_model", lambda *_: shape),
        patch.object(policy_module, "load_model", lambda *_: build_model(shape, device)),
        patch.object(policy_module, "load_renderer", lambda *_: make_renderer(shape)),
    ):
        return Policy(agent, device=str(device), temperature=1.0, beta=0.0)
