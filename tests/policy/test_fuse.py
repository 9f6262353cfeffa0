"""Small parts made one kernel each: the same log-probabilities and gradients, and less kept."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hacrl.policy import fuse, packing
from hacrl.policy import logprobs as logprobs_module
from hacrl.policy.fuse import LearningFusion, _token_first, worth_fusing
from hacrl.policy.logprobs import LogProbs, make_inputs
from hacrl.policy.packing import attending_again
from hacrl.policy.reuse import Draft
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
    """Compiles, with torch's own derivatives and without code generation, and counts the graphs."""

    def __init__(self) -> None:
        self.backend = CompileCounterWithBackend("aot_eager")

    def __call__(self, function):
        return torch.compile(function, dynamic=True, backend=self.backend)


def learned(logprobs: LogProbs, lengths: tuple[int, ...] = (9, 7, 12)) -> tuple[Tensor, dict]:
    """Log-probabilities, and the gradient of their weighted sum."""
    found_BT = logprobs(rows(lengths))
    (found_BT * torch.linspace(-1, 2, found_BT.numel()).view_as(found_BT)).sum().backward()
    gradients = {n: p.grad for n, p in logprobs.model.named_parameters()}
    logprobs.model.zero_grad()
    return found_BT.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_parts_give_the_same(kind: str, checkpointing: bool) -> None:
    torch._dynamo.reset()
    model = build(kind)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": attending_again})
        model.train()
    logprobs = LogProbs(model, 1.0)
    plain, plain_gradients = learned(logprobs)
    compiler = Counting()
    logprobs._fusion = LearningFusion(model, compiler)
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
    logprobs._fusion = LearningFusion(model, compiler)
    learned(logprobs)
    before = compiler.backend.frame_count
    for lengths in ((5, 5), (11, 3, 8, 6), (14,)):
        learned(logprobs, lengths)
    # norms of the hidden size and of a head's, rotary embedding, gated product: not once a layer
    assert compiler.backend.frame_count == before <= 4


def test_a_draft_is_recorded_and_used_again() -> None:
    """Matrix products stay outside of what is compiled, where a draft sees them."""
    torch._dynamo.reset()
    model = build("qwen3")
    logprobs = LogProbs(model, 1.0)
    plain, gradients = learned(logprobs)
    compiler = Counting()
    logprobs._fusion = LearningFusion(model, compiler)
    given = rows((9, 7, 12))
    slope_BT = torch.linspace(-1, 2, plain.numel()).view_as(plain)
    graphs = []
    for _ in range(3):
        draft = Draft(logprobs, given)
        assert draft.usable and (draft.logprobs_BT - plain).abs().max() < 1e-5
        again_BT = draft.again([0, 1, 2], rows((9, 7, 12)))
        again_BT.backward(slope_BT)
        for name, parameter in model.named_parameters():
            assert (parameter.grad - gradients[name]).abs().max() < 1e-5, name
        model.zero_grad()
        graphs.append(compiler.backend.frame_count)
    assert graphs[0] == graphs[-1] <= 8  # with and without gradient


def test_fused_parts_keep_their_inputs_only() -> None:
    """Bytes a token and layer of this Qwen3 in bfloat16, by hand: two norms' inputs and results 4 x 64;
    queries, keys before norm (64 + 32), after the rotary embedding (64 + 32), values 32, attention's
    result 64 and normaliser 4 x 4; gate, up and product 3 x 96. Then the last norm's input, angles."""
    with torch.device("meta"):
        model = build("qwen3", torch.bfloat16)
    layer = 4 * 64 + 96 + 96 + 32 + 64 + 16 + 3 * 96
    fused, plain = (_measure(model, torch.bfloat16, fused) for fused in (True, False))
    assert fused is not None and plain is not None
    angles = 2 * 8 * 2
    assert fused.kept == pytest.approx(3 * layer + 64 + angles, rel=0.02)
    assert plain.kept > 1.4 * fused.kept


def test_small_models_and_cpus_are_left_alone() -> None:
    assert not worth_fusing(build("llama"))


def test_a_module_of_another_form_is_left_as_it_is() -> None:
    """Same names, another product: what it gives decides, not what it is called."""
    torch._dynamo.reset()
    model = build("llama")
    layer = model.model.layers[0].mlp
    kind = type(layer)
    odd = type("Odd", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    layer.__class__ = odd
    fusion = LearningFusion(model, partial(torch.compile, backend="eager"))
    assert layer not in fusion._forward
    assert model.model.layers[1].mlp in fusion._forward


def test_a_module_that_holds_more_is_left_as_it_is() -> None:
    """A scale of 1 changes nothing before it is trained."""
    torch._dynamo.reset()
    model = build("llama")
    layer = model.model.layers[0].mlp
    kind = type(layer)
    layer.__class__ = type(
        "Scaled", (kind,), {"forward": lambda s, x: s.scale * kind.forward(s, x)}
    )
    layer.scale = nn.Parameter(torch.ones(()))
    fusion = LearningFusion(model, partial(torch.compile, backend="eager"))
    assert layer not in fusion._forward
    assert model.model.layers[1].mlp in fusion._forward


def test_experts_stay_outside() -> None:
    """Their matrices are no linear layers, and routing depends on values. Of two layers with two experts
    of four a token keeps in bfloat16 at least the experts' inputs, 2 x 64, and their inner results, 2 x
    3 x 64, a layer."""
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
    # as much as a dense layer of 48 keeps without its gate, up and product, and the experts' besides
    assert routed.kept / 2 > dense.kept / 3 - 3 * 96 + 2 * 64 + 2 * 3 * 64


def _on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return build(kind, torch.bfloat16)


def test_a_rotary_embedding_is_called_as_its_model_calls_it() -> None:
    """Gemma 3n names the axis: apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)."""
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


def test_a_rotary_embedding_is_turned_only_where_it_can_be() -> None:
    """With four tensors the compiled one gets tokens before heads and is told so; called in a way of the
    model's own, or without an axis to name, it gets what it is given."""
    calls = []

    def compiled(*given, **named):
        calls.append(([tuple(t.shape) for t in given], named))
        return given[:2]

    def usual(q, k, cos, sin, unsqueeze_dim=1): ...

    def other(q, k, cos, sin): ...

    heads, angles = torch.zeros(1, 4, 7, 8), torch.zeros(1, 7, 8)
    turned = _token_first(usual, compiled)
    found = turned(heads, heads[:, :2], angles, angles)
    assert [t.shape for t in found] == [(1, 4, 7, 8), (1, 2, 7, 8)]
    turned(heads, angles, angles, unsqueeze_dim=2)
    turned(heads, heads, angles, angles, unsqueeze_dim=1)
    turned(heads, heads, angles, angles, angles)
    assert _token_first(other, compiled) is compiled
    turning, *plain = calls
    assert turning == ([(1, 7, 4, 8), (1, 7, 2, 8), (1, 7, 8), (1, 7, 8)], {"unsqueeze_dim": 2})
    assert [(given[0], named) for given, named in plain] == [
        ((1, 4, 7, 8), {"unsqueeze_dim": 2}),
        ((1, 4, 7, 8), {"unsqueeze_dim": 1}),
        ((1, 4, 7, 8), {}),
    ]


def test_activations_that_are_functions_and_modules_of_other_inputs() -> None:
    """A function is served like a module, each by itself; what wants a second input is left alone."""
    model = build("llama")
    one, two, three = (layer.mlp for layer in model.model.layers)
    del one.act_fn, two.act_fn
    one.act_fn, two.act_fn = torch.nn.functional.silu, torch.tanh
    kind = type(three)
    three.__class__ = type(
        "Scaled", (kind,), {"forward": lambda self, x, scale: scale * kind.forward(self, x)}
    )
    fusion = LearningFusion(model, lambda function: function)
    assert three not in fusion._forward
    hidden = torch.randn(1, 3, 32)
    plain = [mlp(hidden) for mlp in (one, two)]
    with fusion.on():
        fused = [mlp(hidden) for mlp in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


@pytest.mark.parametrize("works", [True, False])
def test_what_cannot_be_compiled_with_gradient_is_left_out(works: bool, monkeypatch) -> None:
    """Tried when the model is loaded, not found out in the first update."""
    torch._dynamo.reset()
    backend = "aot_eager" if works else no_backward
    monkeypatch.setattr(
        fuse, "_compile", lambda function: torch.compile(function, dynamic=True, backend=backend)
    )
    logprobs = LogProbs(build("llama"), 1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fusion = logprobs._right_fusion()
    assert (fusion is not None) == works
    assert any("cannot be compiled" in str(w.message) for w in told) != works
    assert logprobs._fusion is None


def no_backward(graph, _):
    """A compiler that gives up as soon as a derivative is wanted."""

    def run(*inputs):
        if torch.is_grad_enabled():
            raise RuntimeError("no derivative")
        return graph(*inputs)

    return run


def test_what_compiles_to_something_else_is_left_out_and_told(monkeypatch) -> None:
    """A compiler that halves every result."""

    def halved(function):
        def call(*arguments, **named):
            found = function(*arguments, **named)
            return tuple(f / 2 for f in found) if isinstance(found, tuple) else found / 2

        return call

    monkeypatch.setattr(fuse, "_compile", halved)
    logprobs = LogProbs(build("llama"), 1.0)
    with pytest.warns(UserWarning, match="something else when compiled"):
        assert logprobs._right_fusion() is None
    assert not logprobs.fused


@pytest.mark.parametrize(
    ("dtype", "gap", "right"),
    [
        (torch.bfloat16, 0.09, True),
        (torch.bfloat16, 0.11, False),
        (torch.float32, 0.0009, True),
        (torch.float32, 0.0011, False),
    ],
)
def test_compiled_parts_may_lie_further_off(dtype, gap: float, right: bool, monkeypatch) -> None:
    """By a tenth of how far tokens lie apart in half precision, whatever attention rounds; by a
    thousandth in float32."""
    logprobs = LogProbs(build("llama").to(dtype).eval(), 1.0)
    assert logprobs._allowed == (0.05 if dtype == torch.bfloat16 else 1e-3)
    monkeypatch.setattr(fuse, "_compile", lambda function: function)
    monkeypatch.setattr(logprobs_module, "_gap", lambda *_: gap)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert (logprobs._right_fusion() is not None) == right
    assert any("something else when compiled" in str(w.message) for w in told) != right


class Noting(TorchDispatchMode):
    """Which copies are made."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.copied.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class KernelLike(torch.autograd.Function):
    """Takes and gives tensors that lie token by token, as the GPU's kernel does."""

    @staticmethod
    def forward(ctx, query, key, value):
        assert all(t.is_contiguous() for t in (query, key, value))
        ctx.save_for_backward(query, key, value)
        return query * 2

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_contiguous()
        return tuple(torch.ones_like(t) for t in ctx.saved_tensors)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_gradients_of_heads_are_not_copied(kind: str, monkeypatch) -> None:
    """Around the kernel queries, keys and values change their axes, and stay where they lie."""
    torch._dynamo.reset()
    model = build(kind)
    logprobs = LogProbs(model, 1.0)
    monkeypatch.setattr(packing, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(packing, "varlen_attn", lambda q, k, v, *_, **__: KernelLike.apply(q, k, v))
    logprobs._fusion = LearningFusion(model, Counting())
    logprobs(rows((9, 7, 12))).sum().backward()  # compiles
    total = logprobs(rows((9, 7, 12))).sum()
    with Noting() as noting:
        total.backward()
    size = model.config.head_dim
    assert not [s for s in noting.copied if len(s) > 2 and s[-1] == size], noting.copied


def test_a_full_memory_is_no_reason_to_leave_parts_as_they_are(monkeypatch) -> None:
    """It would round otherwise than the same run with room."""

    def full(function):
        def call(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return call

    monkeypatch.setattr(fuse, "_compile", full)
    logprobs = LogProbs(build("llama"), 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        logprobs._right_fusion()
    assert not logprobs.fused
