"""Compiled small operations: the same log-probabilities and gradients, with less memory."""

from functools import partialmethod

import pytest
import torch
from small_models import SMALL, assert_same_learned, learned, model_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from hacrl.policy import packing
from hacrl.policy.batch import Inputs, make_inputs
from hacrl.policy.fuse import LearningFusion
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import attending_again


def rows(lengths: tuple[int, ...] = (9, 7, 12)) -> Inputs:
    ids = [[(5 * i + n) % 97 for i in range(n)] for n in lengths]
    return make_inputs(ids, [[0, 0] + [1] * (n - 2) for n in lengths], 0, torch.device("cpu"))


def on_meta(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()


class Counting:
    """A compiler without code generation that counts graphs."""

    def __init__(self) -> None:
        self.backend = CompileCounterWithBackend("aot_eager")

    def __call__(self, function):
        return torch.compile(function, dynamic=True, backend=self.backend)


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("qwen", False), ("qwen", True), ("gemma3", False), ("llama", True)],
)
def test_values_and_gradients_are_the_same(family: str, checkpointing: bool) -> None:
    torch._dynamo.reset()
    model = model_of(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": attending_again})
        model.train()
    logprobs = LogProbs(model, 1.0)
    plain = learned(logprobs, rows())
    compiler = Counting()
    logprobs.fusion = LearningFusion(model, compiler)
    assert_same_learned(learned(logprobs, rows()), plain)
    assert compiler.backend.frame_count >= 3  # norms, rotary embedding, gated product
    assert not any("forward" in vars(module) for module in model.modules())


def test_one_compilation_serves_all_layers_and_lengths() -> None:
    torch._dynamo.reset()
    model = model_of("qwen")
    logprobs = LogProbs(model, 1.0)
    compiler = Counting()
    logprobs.fusion = LearningFusion(model, compiler)
    learned(logprobs, rows())
    before = compiler.backend.frame_count
    for lengths in ((5, 5), (11, 3, 8, 6), (14,)):
        learned(logprobs, rows(lengths))
    # norms of two sizes, rotary embedding, gated product: not once per layer
    assert compiler.backend.frame_count == before <= 4


def doubled(kind, mlp, x):
    return 2 * kind.forward(mlp, x)


def scaled(kind, mlp, x):  # by 1 before training
    return mlp.scale * kind.forward(mlp, x)


def with_second_input(kind, mlp, x, scale):
    return scale * kind.forward(mlp, x)


@pytest.mark.parametrize("forward", [doubled, scaled, with_second_input])
def test_an_unusual_mlp_is_not_compiled(forward) -> None:
    """Its output and its parameters decide, not its attribute names."""
    model = model_of("llama")
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
    """Routing depends on values."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = on_meta(Qwen3MoeConfig(**{**SMALL, "num_hidden_layers": 2}, **experts, head_dim=16))
    fusion = LearningFusion(model, lambda function: function)
    assert {type(part).__name__ for part in fusion._forward} == {"Qwen3MoeRMSNorm"}


def test_the_rotary_function_may_have_another_signature() -> None:
    """Gemma 3n calls apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)."""
    torch.manual_seed(3)
    small = {
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
    }
    config = Gemma3nTextConfig(**{**SMALL, "intermediate_size": [48] * 3}, head_dim=8, **small)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with LearningFusion(model, lambda function: function).on():
            fused = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(fused, plain, atol=1e-5)


def test_activations_may_be_functions() -> None:
    model = model_of("llama")
    one, two, _ = (layer.mlp for layer in model.model.layers)
    del one.act_fn, two.act_fn
    one.act_fn, two.act_fn = torch.nn.functional.silu, torch.tanh
    fusion = LearningFusion(model, lambda function: function)
    hidden = torch.randn(1, 3, 32)
    plain = [mlp(hidden) for mlp in (one, two)]
    with fusion.on():
        fused = [mlp(hidden) for mlp in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


class RecordedCopies(TorchDispatchMode):
    """Records the shapes of copied tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class KernelLike(torch.autograd.Function):
    """Takes and returns tensors with tokens first, like the GPU kernel."""

    @staticmethod
    def forward(ctx, query, key, value):
        assert all(t.is_contiguous() for t in (query, key, value))
        ctx.save_for_backward(query, key, value)
        return query * 2

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_contiguous()
        return tuple(torch.ones_like(t) for t in ctx.saved_tensors)


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_gradients_of_heads_are_not_copied(family: str, monkeypatch) -> None:
    """Around the GPU kernel queries, keys and values change their axes without a copy."""
    torch._dynamo.reset()
    model = model_of(family)
    logprobs = LogProbs(model, 1.0)
    monkeypatch.setattr(packing, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(packing, "varlen_attn", lambda q, k, v, *_, **__: KernelLike.apply(q, k, v))
    logprobs.fusion = LearningFusion(model, Counting())
    logprobs(rows()).sum().backward()  # compiles
    total = logprobs(rows()).sum()
    with RecordedCopies() as copies:
        total.backward()
    size = model.config.head_dim
    assert not [s for s in copies.shapes if len(s) > 2 and s[-1] == size], copies.shapes
