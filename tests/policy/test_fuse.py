"""Compiled small operations: the same log-probabilities and gradients, with less memory."""

from __future__ import annotations

from functools import partialmethod

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hacrl.policy.batch import make_inputs
from hacrl.policy.fuse import LearningFusion
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import attending_again
from hacrl.study.doctor.activations import _measure

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
KINDS = {"qwen3": Qwen3Config, "gemma3": Gemma3TextConfig, "llama": LlamaConfig}


def build(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    config: PretrainedConfig = KINDS[kind](**SMALL)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def rows(lengths: tuple[int, ...]):
    ids = [[(5 * i + n) % 97 for i in range(n)] for n in lengths]
    return make_inputs(ids, [[0, 0] + [1] * (n - 2) for n in lengths], 0, torch.device("cpu"))


class Counting:
    """A compiler without code generation that counts graphs."""

    def __init__(self) -> None:
        self.backend = CompileCounterWithBackend("aot_eager")

    def __call__(self, function):
        return torch.compile(function, dynamic=True, backend=self.backend)


def learned(logprobs: LogProbs, lengths: tuple[int, ...] = (9, 7, 12)) -> tuple[Tensor, dict]:
    """Log-probabilities and the gradient of their weighted sum."""
    found_BT = logprobs(rows(lengths))
    (found_BT * torch.linspace(-1, 2, found_BT.numel()).view_as(found_BT)).sum().backward()
    gradients = {n: p.grad for n, p in logprobs.model.named_parameters()}
    logprobs.model.zero_grad()
    return found_BT.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_the_same(kind: str, checkpointing: bool) -> None:
    torch._dynamo.reset()
    model = build(kind)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": attending_again})
        model.train()
    logprobs = LogProbs(model, 1.0)
    plain, plain_gradients = learned(logprobs)
    compiler = Counting()
    logprobs.fusion = LearningFusion(model, compiler)
    fused, fused_gradients = learned(logprobs)
    assert compiler.backend.frame_count >= 3  # norms, rotary embedding, gated product
    assert (fused - plain).abs().max() < 1e-5
    for name, gradient in plain_gradients.items():
        assert (fused_gradients[name] - gradient).abs().max() < 1e-5, name
    assert not any("forward" in vars(module) for module in model.modules())


def test_one_compilation_serves_all_layers_and_lengths() -> None:
    torch._dynamo.reset()
    model = build("qwen3")
    logprobs = LogProbs(model, 1.0)
    compiler = Counting()
    logprobs.fusion = LearningFusion(model, compiler)
    learned(logprobs)
    before = compiler.backend.frame_count
    for lengths in ((5, 5), (11, 3, 8, 6), (14,)):
        learned(logprobs, lengths)
    # norms of two sizes, rotary embedding, gated product: not once per layer
    assert compiler.backend.frame_count == before <= 4


def test_compiled_operations_keep_only_their_inputs() -> None:
    """Bytes per token and layer of this Qwen3 in bfloat16: inputs and outputs of two norms 4 x 64;
    queries and keys before the norm (64 + 32) and after the rotary embedding (64 + 32), values 32,
    attention's output 64 and normaliser 4 x 4; gate, up and product 3 x 96. Then the last norm's input
    and angles."""
    with torch.device("meta"):
        model = build("qwen3", torch.bfloat16)
    layer = 4 * 64 + 96 + 96 + 32 + 64 + 16 + 3 * 96
    fused, plain = (_measure(model, torch.bfloat16, fused) for fused in (True, False))
    assert fused is not None and plain is not None
    angles = 2 * 8 * 2
    assert fused.kept == pytest.approx(3 * layer + 64 + angles, rel=0.02)
    assert plain.kept > 1.4 * fused.kept


def doubled(kind, mlp, x):
    return 2 * kind.forward(mlp, x)


def scaled(kind, mlp, x):  # by 1 before training
    return mlp.scale * kind.forward(mlp, x)


def with_second_input(kind, mlp, x, scale):
    return scale * kind.forward(mlp, x)


@pytest.mark.parametrize("forward", [doubled, scaled, with_second_input])
def test_an_unusual_mlp_is_not_compiled(forward) -> None:
    """Its output and its parameters decide, not its attribute names."""
    model = build("llama")
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    mlp.__class__ = type(
        "Odd", (kind,), {"forward": partialmethod(lambda s, *a: forward(kind, s, *a))}
    )
    if forward is scaled:
        mlp.scale = nn.Parameter(torch.ones(()))
    fusion = LearningFusion(model, lambda function: function)
    assert mlp not in fusion._forward
    assert model.model.layers[1].mlp in fusion._forward


def test_experts_are_not_compiled() -> None:
    """Routing depends on values. With two of four experts a token keeps in bfloat16 at least their
    inputs, 2 x 64, and inner results, 2 x 3 x 64, per layer."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**{**SMALL, "num_hidden_layers": 2}, **experts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    fusion = LearningFusion(model, lambda function: function)
    assert {type(part).__name__ for part in fusion._forward} == {"Qwen3MoeRMSNorm"}
    routed, dense = (_measure(m, torch.bfloat16, True) for m in (model, _on_meta("qwen3")))
    assert routed is not None and dense is not None
    # a dense layer of 48 without gate, up and product, plus the experts
    assert routed.kept / 2 > dense.kept / 3 - 3 * 96 + 2 * 64 + 2 * 3 * 64


def _on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return build(kind, torch.bfloat16)


def test_the_rotary_function_may_have_another_signature() -> None:
    """Gemma 3n calls apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)."""
    torch.manual_seed(3)
    small = {
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
    }
    config = Gemma3nTextConfig(**{**SMALL, "intermediate_size": [48] * 3}, **small)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with LearningFusion(model, lambda function: function).on():
            fused = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(fused, plain, atol=1e-5)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        assert _measure(model, torch.bfloat16, True) is not None


def test_activations_may_be_functions() -> None:
    model = build("llama")
    one, two, _ = (layer.mlp for layer in model.model.layers)
    del one.act_fn, two.act_fn
    one.act_fn, two.act_fn = torch.nn.functional.silu, torch.tanh
    fusion = LearningFusion(model, lambda function: function)
    hidden = torch.randn(1, 3, 32)
    plain = [mlp(hidden) for mlp in (one, two)]
    with fusion.on():
        fused = [mlp(hidden) for mlp in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
