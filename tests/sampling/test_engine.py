"""The built-in sampler: which models its KV cache fits, the fallback, and the draw."""

import warnings

import pytest
import torch
from small_models import ENDS, SMALL, attends_to_nothing, model_of, plainly, same, some_requests
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hacrl.noise import exponential_noise
from hacrl.pocket import pocket_path
from hacrl.policy import attention as attention_module
from hacrl.policy.logprobs import LogProbs
from hacrl.sampling import compatibility, transformers_cache
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.compatibility import find_cache_shape
from hacrl.sampling.decode import has_static_rope
from hacrl.sampling.engine import BuiltinSampler
from hacrl.sampling.transformers_cache import draw


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen", "gemma3", "gemma2", "gpt2"])
def test_replies_do_not_depend_on_rows_or_order(family: str) -> None:
    model, asked = model_of(family), some_requests()
    for temperature in (1.0, 0.0):
        wanted = plainly(model, asked, temperature)
        if temperature:
            assert any(r.stopped for r in wanted) and any(not r.stopped for r in wanted)
            assert trainer_error(model, asked, wanted) < 2e-5
        for rows in (64, 4, 1):
            same(BuiltinSampler(model, ENDS, 0, rows).sample(asked, temperature), wanted)
        same(BuiltinSampler(model, ENDS, 0, 64).sample(asked[::-1], temperature), wanted[::-1])
    assert BuiltinSampler(model, ENDS, 0, 64).sample([], 1.0) == []


def test_long_limits_take_fewer_rows(monkeypatch) -> None:
    """3 layers x 2 heads x 8 numbers x 2 x 4 bytes = 384 bytes per token; 34 tokens at the longest. And
    one prompt at a time, if a prefill takes no two."""
    model, asked, rows = model_of("llama"), some_requests(), []
    wanted = plainly(model, asked)
    monkeypatch.setattr(transformers_cache, "device_memory", lambda device: 2 * 5 * 34 * 384)
    monkeypatch.setattr(
        transformers_cache, "draw", lambda *given: rows.append(len(given[0])) or draw(*given)
    )
    same(BuiltinSampler(model, ENDS, 0, 64, cache_fraction=0.5).sample(asked, 1.0), wanted)
    assert max(rows) == 5
    rows.clear()
    monkeypatch.setattr(transformers_cache, "PREFILL_TOKENS", 20)
    same(plainly(model, asked), wanted)
    assert max(rows) == 6  # prompts of 1 and 3 tokens, three samples of each


def trainer_error(model, asked: list[Request], replies: list[Reply]) -> float:
    """Largest difference from the log-probabilities of a plain forward pass."""
    errors = []
    for request, reply in zip(asked, replies, strict=True):
        ids = torch.tensor([*request.prompt_ids, *reply.token_ids])
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(1).gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0]
        errors.append((logprobs - torch.tensor(reply.logprobs)).abs().max().item())
    return max(errors)


# ---------------------------------------------------------------- which models the KV cache fits


@torch.no_grad()
@pytest.mark.parametrize("family", ["falcon", "lfm2"])
def test_layers_with_other_state_use_transformers_cache(family: str) -> None:
    """Falcon-H1 and LFM2 keep state besides keys and values."""
    torch.manual_seed(0)
    if family == "falcon":
        sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
        config = FalconH1Config(**SMALL, **sizes, mamba_d_state=8, mamba_chunk_size=16)
    else:
        config = Lfm2Config(**SMALL, full_attn_idxs=[0])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data *= 1.5
    with pytest.warns(UserWarning, match=r"KV cache disabled .*using transformers' cache"):
        assert find_cache_shape(model.eval()) is None
    sampler, asked = BuiltinSampler(model, (), 0, 4), some_requests(3, 2)
    replies = sampler.sample(asked, 1.0)
    assert sampler.cache_kind == "transformers"
    assert trainer_error(model, asked, replies) < 2e-5


@torch.no_grad()
def test_a_window_that_only_the_mask_has_uses_transformers_cache() -> None:
    """The window is longer than the compared tokens, so the logits agree and nothing is warned."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    windows = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 3}
    wide = {"shared_expert_intermediate_size": 32, "initializer_range": 0.1}
    config = Qwen2MoeConfig(**SMALL, **experts, **windows, **wide)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "sliding_attention" in model.config.layer_types
    sampler, asked = BuiltinSampler(model, (), 0, 4), some_requests()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_cache_shape(model) is None
        replies = sampler.sample(asked, 1.0)
    assert sampler.cache_kind == "transformers"
    assert trainer_error(model, asked, replies) < 2e-5
    assert not LogProbs(model, 1.0).packs


@torch.no_grad()
@pytest.mark.parametrize("name", ["wren", "finch", "heron"])
def test_the_limit_in_half_precision_follows_the_models_rounding(name: str, monkeypatch) -> None:
    """Above MAX_ERROR_HALF (0 here; large models reach it) twice the difference between two attention
    kernels of transformers is allowed. A cache that loses tokens is refused all the same."""
    model = AutoModelForCausalLM.from_pretrained(
        pocket_path(name), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_cache_shape(model) is not None
        monkeypatch.setattr(compatibility, "MAX_ERROR_HALF", 0.0)
        assert find_cache_shape(model) is not None
    whole = attention_module.causal

    def forgetful(query, key, value, rule):
        queries = query.shape[2]
        return whole(query, key[:, :, -queries:], value[:, :, -queries:], rule)

    monkeypatch.setattr(attention_module, "causal", forgetful)
    for limit in (0.0, 0.05):
        monkeypatch.setattr(compatibility, "MAX_ERROR_HALF", limit)
        with pytest.warns(UserWarning, match="several times slower"):
            assert find_cache_shape(model) is None
    # A kernel that omits what the model has must not raise the limit any further.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attends_to_nothing)
    with pytest.warns(UserWarning, match=r"> 0\.15"):
        assert find_cache_shape(model) is None


@torch.no_grad()
def test_score_caps_are_applied() -> None:
    """transformers' sdpa, the default attention, omits the cap."""
    model = model_of("gemma2")
    for parameter in model.parameters():
        parameter.data *= 3  # so that scores reach the cap
    model.config._attn_implementation = "sdpa"
    asked = some_requests(3, 2)
    replies = BuiltinSampler(model, (), 0, 8).sample(asked, 1.0)
    assert find_cache_shape(model) is not None and LogProbs(model, 1.0).packs
    model.config._attn_implementation = "eager"
    assert trainer_error(model, asked, replies) < 2e-5


def test_dynamic_rope_is_not_captured() -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0}
    assert not has_static_rope(LlamaForCausalLM(LlamaConfig(**SMALL, rope_scaling=scaled)))
    assert has_static_rope(model_of("gemma3"))


# ---------------------------------------------------------------- the draw


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_draw_is_gumbel_max(temperature: float) -> None:
    """Logits from flat to sharp, one word impossible."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.1, 30, 500).unsqueeze(1)
    logits = torch.randn(500, 300, generator=generator) * spread
    logits[:, 7] = -torch.inf
    key = torch.randint(-(2**62), 2**62, (500,), generator=generator)
    index = torch.arange(500) % 40
    token, logprob = draw(logits, key, index, temperature)
    wanted = (logits / (temperature or 1.0)).double().log_softmax(1)
    noise = exponential_noise(key, index, 300).log_().neg_().double() if temperature else 0.0
    assert torch.equal(token, (wanted + noise).argmax(1))
    chosen = wanted.gather(1, token.unsqueeze(1)).squeeze(1)
    assert (logprob - chosen).abs().max() < 2e-6
