"""Small models of several families, requests to them, and the expected replies."""

import copy
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from hacrl.policy.batch import Inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.transformers_cache import TransformersSampler

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
WINDOWS = {
    **SMALL,
    "head_dim": 16,
    "sliding_window": 6,  # shorter than the sequences
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),  # biases on queries, keys and values
    "qwen": Qwen3Config(**SMALL, head_dim=16),
    "gpt2": GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4),
    "gemma3": Gemma3TextConfig(**WINDOWS),
    "gemma2": Gemma2Config(**WINDOWS, attn_logit_softcapping=2.0),
}
ENDS = (5, 6, 7, 8)


def model_of(family: str):
    """A random model; Gemma 2 with eager attention, because transformers' sdpa omits its score cap."""
    torch.manual_seed(0)
    attention = "eager" if family == "gemma2" else "sdpa"
    config = copy.deepcopy(CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # larger than initial weights, so that tokens differ
        parameter.data *= 1.5
    return model.eval()


def save_model(config, folder: Path, other: Path) -> Path:
    """A random model of this config, with the tokenizer of the model folder `other`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for parameter in model.parameters():  # no zeros, which would switch a part off
        parameter.data *= 1.5
        parameter.data += 0.1 * torch.randn(parameter.shape) * (parameter.ndim == 1)
    model.save_pretrained(folder)
    for pattern in ("token*", "chat_template*"):
        for file in other.glob(pattern):
            shutil.copy(file, folder)
    return folder


def some_requests(prompts: int = 6, each: int = 3) -> list[Request]:
    """Groups with one prompt each, of lengths around the size of a page and down to one token."""
    draw = random.Random(1)
    asked = []
    for p in range(prompts):
        prompt = tuple(draw.randrange(300) for _ in range((1, 3, 8, 9, 17, 20)[p % 6]))
        for _ in range(each):
            key = draw.randrange(-(2**63), 2**63)
            asked.append(Request(prompt, key, draw.choice((3, 10, 14))))
    return asked


def plainly(model, asked, temperature=1.0) -> list[Reply]:
    return TransformersSampler(model, ENDS, 0, 64).sample(asked, temperature)


def attends_to_nothing(module, query, *_, **__):
    """An attention that transformers accepts: all zeros."""
    return torch.zeros_like(query).transpose(1, 2), None


def learned(logprobs: LogProbs, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and the gradient of their weighted sum."""
    logprobs.model.zero_grad()
    values_BT = logprobs(inputs)
    (values_BT * torch.linspace(-1, 1, values_BT.numel()).view_as(values_BT)).sum().backward()
    return values_BT.detach(), {n: p.grad for n, p in logprobs.model.named_parameters()}


def assert_same_learned(one, other) -> None:
    assert torch.allclose(one[0], other[0], atol=2e-5)
    assert one[0].std() > 0.3  # tokens differ in probability
    for name, gradient in other[1].items():
        scale = max(gradient.abs().max(), 1)
        assert torch.allclose(one[1][name], gradient, atol=1e-5 * scale), name


def same(one: list[Reply], other: list[Reply]) -> None:
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert [r.stopped for r in one] == [r.stopped for r in other]
    for a, b in zip(one, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
