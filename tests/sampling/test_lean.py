"""The lean scheme on a CPU: the model's own logits, or it is not used."""

from __future__ import annotations

import pytest
import torch
from small_models import ENDS, SMALL, model_of, plainly, same, some_requests
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hacrl.sampling import lean as lean_module
from hacrl.sampling.base import Request
from hacrl.sampling.engine import BuiltinSampler
from hacrl.sampling.lean import LeanForward, fits
from hacrl.sampling.transformers_cache import TransformersSampler


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_the_lean_step_is_the_models_own(family: str) -> None:
    model, asked = model_of(family), some_requests()
    lean, library = BuiltinSampler(model, ENDS, 0, 64), BuiltinSampler(model, ENDS, 0, 64)
    replies = lean.sample(asked, 1.0)
    assert lean._lean
    library.sample(asked[:1], 1.0)
    library._lean = False
    for a, b in zip(replies, library.sample(asked, 1.0), strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)
    model.train()  # a step leaves nothing behind that the trainer could not use
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_the_usual_parts_are_known(family: str) -> None:
    """Called as they are they would give the same replies, only slower."""
    model = model_of(family)
    lean = LeanForward(model)
    assert lean.signed and lean.norm is not model.model.norm
    for layer, own in zip(lean.layers, model.model.layers, strict=True):
        norms = (own.input_layernorm, own.post_attention_layernorm)
        assert not {*norms} & {*layer.norms} and layer.gated is not None
        assert all(product.weight is not None for product in (*layer.products, layer.out))
        assert len(layer.head_norms) == (2 if family == "qwen" else 0)
        assert not {*own.self_attn.children()} & {*layer.head_norms}


def test_what_looks_like_the_scheme_and_is_not_goes_through_the_library() -> None:
    """Granite scales its residuals, SmolLM3 leaves out the rotary embedding of some layers, Ministral 3
    scales queries from the sixteenth token here on: the parts have the same names."""
    torch.manual_seed(0)
    granite = GraniteForCausalLM(GraniteConfig(**SMALL, residual_multiplier=0.5)).eval()
    smol = SmolLM3ForCausalLM(SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1], pad_token_id=0))
    scaling = {"llama_4_scaling_beta": 1.0, "original_max_position_embeddings": 16}
    angles = {"rope_type": "default", "rope_theta": 1e4, **scaling}
    ministral = Ministral3ForCausalLM(
        Ministral3Config(**SMALL, head_dim=8, max_position_embeddings=64, rope_parameters=angles)
    )
    for parameter in ministral.parameters():
        parameter.data *= 3
    for model in (granite, smol.eval(), ministral.eval()):
        assert fits(model)
        sampler = BuiltinSampler(model, ENDS, 0, 64)
        asked = some_requests(3, 2)
        same(sampler.sample(asked, 1.0), plainly(model, asked))
        assert sampler._shape is not None and not sampler._lean
    assert not fits(model_of("gemma3")) and not fits(model_of("gpt2"))


def test_clipped_queries_are_seen_when_they_reach_the_clip() -> None:
    """Small weights, as at the start of a training, do not reach it."""
    torch.manual_seed(0)
    model = OlmoForCausalLM(OlmoConfig(**SMALL, clip_qkv=1.0, pad_token_id=0)).eval()
    sampler, asked = BuiltinSampler(model, ENDS, 0, 64), some_requests()
    for _ in range(2):
        same(sampler.sample(asked, 1.0), plainly(model, asked))
        for parameter in model.parameters():
            parameter.data *= 20


def test_a_window_that_a_model_does_not_hand_over_is_none() -> None:
    """Of twelve tokens, which the eight that are tried do not reach."""
    model, asked = model_of("llama"), some_requests()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 12
    same(BuiltinSampler(model, ENDS, 0, 64).sample(asked, 1.0), plainly(model, asked))


def test_in_half_precision_every_step_goes_through_the_library() -> None:
    """There a rotary embedding too many is no larger than what is rounded away."""
    torch.manual_seed(0)
    smol = SmolLM3ForCausalLM(SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1], pad_token_id=0))
    for model in (smol.eval().bfloat16(), model_of("llama").bfloat16()):
        sampler = BuiltinSampler(model, ENDS, 0, 64)
        sampler.sample(some_requests(2, 2), 1.0)
        assert sampler._shape is not None and not sampler._lean


def test_parts_that_are_not_the_usual_ones_are_called_as_they_are() -> None:
    """Biases; half a head turned, neighbours against each other, and gate and up in one; listeners."""
    torch.manual_seed(0)
    biased = Qwen2ForCausalLM(Qwen2Config(**SMALL)).eval()
    angles = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    glm = GlmForCausalLM(GlmConfig(**SMALL, head_dim=8, rope_parameters=angles, pad_token_id=0))
    listened, heard = model_of("qwen"), []
    for module in (listened.model.layers[0].mlp, listened.model.norm):
        module.register_forward_hook(lambda *_: heard.append(1))
    for model in (biased, glm.eval(), listened):
        for name, parameter in model.named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(parameter)
        heard.clear()
        sampler, asked = BuiltinSampler(model, ENDS, 0, 64), some_requests()
        replies = sampler.sample(asked, 1.0)
        assert sampler._lean and len(heard) >= (model is listened) * 2 * 14
        same(replies, plainly(model, asked))


class CentredNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class ShiftedNorm(LlamaRMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return super().forward(x) + self.bias


class ShiftedGate(LlamaMLP):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.bias = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x):
        return super().forward(x) + self.bias


def test_weights_that_add_nothing_at_first_count_when_they_are_trained() -> None:
    """What looks like the usual norm or gated product, and is more or other."""
    asked = some_requests()
    for kind in (CentredNorm, ShiftedNorm, ShiftedGate):
        model = model_of("llama")
        for layer in model.model.layers:
            name = "mlp" if kind is ShiftedGate else "input_layernorm"
            own = layer._modules[name]
            made = kind(model.config) if kind is ShiftedGate else kind(32, own.variance_epsilon)
            made.load_state_dict(own.state_dict(), strict=False)
            layer._modules[name] = made
        sampler = BuiltinSampler(model.eval(), ENDS, 0, 64)
        before = sampler.sample(asked, 1.0)
        same(before, plainly(model, asked))
        assert sampler._lean, kind
        for name, parameter in model.named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(parameter)
        same(sampler.sample(asked, 1.0), plainly(model, asked))


def test_a_wrapper_with_weights_of_its_own_is_not_left_out() -> None:
    model = model_of("llama")
    assert fits(model)
    model.model.layers[1].scale = torch.nn.Parameter(torch.ones(1))
    assert not fits(model)


def test_what_a_model_writes_does_not_depend_on_who_wrote_before(monkeypatch) -> None:
    """Two models of one class, of which one turns half of each head."""
    asked, written = some_requests(3, 2), []
    for order in ((1.0, 0.5), (0.5, 1.0)):
        monkeypatch.setattr(lean_module, "_usual", type(lean_module._usual)())
        for share in order:
            angles = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
            torch.manual_seed(0)
            config = NemotronConfig(**SMALL, head_dim=8, rope_parameters=angles)
            model = NemotronForCausalLM(config).eval()
            sampler = BuiltinSampler(model, ENDS, 0, 64)
            written.append((share, sampler.sample(asked, 1.0)))
            assert sampler._lean
            same(written[-1][1], plainly(model, asked))
    assert written[0] == written[3] and written[1] == written[2]


def test_who_listens_to_a_layer_hears_every_step() -> None:
    model, asked = model_of("llama"), some_requests(2, 2)
    sampler = BuiltinSampler(model, ENDS, 0, 64)
    replies = sampler.sample(asked, 1.0)
    heard = []
    model.model.layers[1].register_forward_hook(lambda *_: heard.append(1))
    same(sampler.sample(asked, 1.0), replies)
    assert len(heard) > max(len(r.token_ids) for r in replies)  # the steps, and the prompts


def test_frequencies_that_follow_positions_are_asked_for_at_every_lean_step() -> None:
    """Beyond the sixteenth token they depend on how far the batch has come, not on how far it may."""
    torch.manual_seed(0)
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = LlamaForCausalLM(
        LlamaConfig(**SMALL, max_position_embeddings=16, rope_parameters=scaled)
    ).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    asked = [Request((9, 8, 7), 100, 40)]
    sampler = BuiltinSampler(model, (), 0, 4)
    replies = sampler.sample(asked, 1.0)
    assert sampler._lean
    same(replies, TransformersSampler(model, (), 0, 4).sample(asked, 1.0))


def test_lean_steps_use_adapters() -> None:
    lora = pytest.importorskip("peft")
    model, asked = model_of("llama"), some_requests(3, 2)
    before = plainly(model, asked)
    model = lora.inject_adapter_in_model(
        lora.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False), model
    ).eval()
    sampler = BuiltinSampler(model, ENDS, 0, 64)
    replies = sampler.sample(asked, 1.0)
    assert sampler._lean
    same(replies, plainly(model, asked))
    assert [r.token_ids for r in replies] != [r.token_ids for r in before]
