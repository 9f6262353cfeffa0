"""Joined products: what a forward gives, and what happens to parameters that became views."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from small_models import model_of as small_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import AgentConfig, LoraSettings
from hacrl.policy import attention, fuse
from hacrl.policy.fuse import Fusion
from hacrl.policy.lora import add_adapter
from hacrl.policy.policy import Policy
from hacrl.sampling import joined
from hacrl.sampling.joined import Joined
from hacrl.store.checkpoint import Checkpoints
from hacrl.types import Sample, Update

FAMILIES = ["tied", "qwen2", "qwen", "gemma3"]


def model_of(family: str):
    """No bias is 0."""
    model = small_model(family)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.01
    return model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    ids = torch.arange(12).view(4, 3) * 7
    return model(input_ids=ids, use_cache=False).logits


def calls_of_linear(model, monkeypatch) -> list[int]:
    """How many words each product of a forward pass has, in order."""
    rows: list[int] = []
    plain = nn.functional.linear

    def counted(input, weight, bias=None):
        rows.append(len(weight))
        return plain(input, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", counted)
        patch.setattr(joined, "linear", counted)
        logits(model)
    return rows


LOSS = make_algorithm(make_settings("gspo", beta=0.1)).loss
UPDATE = Update(0, 1, 0.8, "own", ("p",))
TOLERANCE = {"float32": 1e-6, "bfloat16": 0.05}


# ---------------------------------------------------------------- what a forward gives


@pytest.mark.parametrize("family", FAMILIES)
def test_a_joined_forward_is_the_plain_one(family: str, monkeypatch) -> None:
    """Each layer has five products of the input and two more; joined, two and two."""
    model = model_of(family)
    plain, names = logits(model), list(model.state_dict())
    products = Joined(model)
    assert len(products.groups) == 2 * 3
    assert torch.equal(logits(model), plain)  # laid, but off
    assert len(calls_of_linear(model, monkeypatch)) == 7 * 3 + 1
    with products.on():
        assert torch.allclose(logits(model), plain, atol=1e-6, rtol=1e-6)
        sizes = calls_of_linear(model, monkeypatch)
    heads = 16 if family in ("qwen", "gemma3") else 8
    assert sizes == [8 * heads, 32, 128, 32] * 3 + [300]
    assert list(model.state_dict()) == names
    assert all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parameter_changed_in_place_is_seen(family: str) -> None:
    """Each member alone, as an update writes them one after the other."""
    model = model_of(family)
    products = Joined(model)
    layer = model.model.layers[1]
    members = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    members += [layer.mlp.gate_proj, layer.mlp.up_proj]
    for parameter in (p for m in members for p in m.parameters()):
        before = logits(model)
        with products.on():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape))
            now = logits(model)
        assert torch.allclose(now, logits(model), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(now, before, atol=1e-4)


def test_slices_reach_attention_without_a_copy() -> None:
    """The kernel takes row and head strides, but each head must be contiguous."""
    model, seen = model_of("qwen"), []

    class Work:
        def attend(self, layer, query, key, value, rule):
            seen.append((value.untyped_storage().nbytes(), value.stride(0), value.stride(1)))
            assert value.stride(3) == 1
            assert query.stride(3) == key.stride(3) == 1
            return query.transpose(1, 2)

    switch = attention.Switch(model)
    with torch.no_grad(), Joined(model).on(), switch.on(), attention.doing(Work()):
        model(input_ids=torch.arange(5).view(5, 1), use_cache=False)
    assert seen == [(5 * 128 * 4, 128, 16)] * 3


def test_members_that_read_different_inputs_compute_alone() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, own, other):
            return self.q_proj(own), self.k_proj(other), self.v_proj(other)

    module = Cross()
    products = Joined(module)
    assert len(products.groups) == 1
    with torch.no_grad(), products.on():
        for own, other in torch.randn(4, 2, 3, 8):
            there = module(own, other)
            wanted = [
                nn.functional.linear(x, m.weight, m.bias)
                for x, m in zip((own, other, other), module.children(), strict=True)
            ]
            for one, two in zip(there, wanted, strict=True):
                assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_around_joined_products_are_compiled_once_for_all_layers(
    family: str, monkeypatch
) -> None:
    """As a fused capture does it, with no graph break; other rows than the first, too."""
    graphs: list[list[str]] = []

    def kept(graph, _):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(
        fuse.torch, "compile", lambda f, dynamic: compiled(f, backend=kept, fullgraph=True)
    )
    torch._dynamo.reset()
    model = model_of(family)
    products, fusion = Joined(model), Fusion(model)
    plain = logits(model)
    with products.on(), fusion.on():
        assert torch.allclose(logits(model), plain, atol=1e-6, rtol=1e-6)
    mlps = [g for g in graphs if any("linear" in name for name in g)]
    assert len(mlps) == 1
    assert sum("linear" in name for name in mlps[0]) == 2  # gate and up; down
    torch._dynamo.reset()


# ---------------------------------------------------------------- which are joined


def test_what_is_not_a_plain_product_stays_alone() -> None:
    adapted = add_adapter(model_of("qwen"), LoraSettings(rank=2))
    before = {n: p.data_ptr() for n, p in adapted.named_parameters()}
    assert not Joined(adapted).groups
    assert {n: p.data_ptr() for n, p in adapted.named_parameters()} == before
    assert not Joined(
        GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2))
    ).groups
    hooked = model_of("tied")
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert len(Joined(hooked).groups) == 5
    mixed = model_of("tied")
    mixed.model.layers[0].mlp.up_proj.to(torch.bfloat16)
    assert len(Joined(mixed).groups) == 5
    tied = model_of("tied")
    tied.model.layers[0].mlp.up_proj.weight = tied.model.layers[1].mlp.up_proj.weight
    assert len(Joined(tied).groups) == 4
    shared = model_of("tied")  # two parameters, one memory
    layers = shared.model.layers
    layers[0].mlp.up_proj.weight.data = layers[1].mlp.up_proj.weight.data
    assert len(Joined(shared).groups) == 4


def test_it_can_be_switched_off(monkeypatch) -> None:
    monkeypatch.setattr(joined, "JOIN", False)
    model = model_of("tied")
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    with Joined(model).on():
        assert all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before


# ---------------------------------------------------------------- what becomes of the parameters


def test_weights_are_laid_once_and_again_after_a_move() -> None:
    """A second sampler of the model must not move what the graphs of the first one read."""
    model = model_of("qwen2")
    Joined(model)
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    products = Joined(model)
    assert len(products.groups) == 6
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places
    model.to(torch.float64).to(torch.float32)  # every parameter has memory of its own again
    plain = logits(model)
    with products.on():
        assert torch.allclose(logits(model), plain, atol=1e-6, rtol=1e-6)
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight.mul_(0)
        assert not torch.allclose(logits(model), plain, atol=1e-4)


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model = model_of("tied")
    with pytest.raises(ZeroDivisionError), Joined(model).on():
        raise ZeroDivisionError
    assert all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))


def test_a_copy_of_the_model_is_its_own() -> None:
    model = model_of("tied")
    Joined(model)
    twin, plain = copy.deepcopy(model), logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    assert torch.equal(logits(twin), plain)


def one_sample(policy: Policy, advantage: float) -> Sample:
    ids = tuple(range(20, 32))
    logprobs = tuple(policy.score([(ids[:6], ids[6:])])[0])
    return Sample(
        problem_id="p",
        index=0,
        source="a",
        is_own=True,
        token_ids=ids,
        loss_mask=(0,) * 6 + (1,) * 6,
        behaviour=sum(logprobs) / 6,
        old_logprobs=logprobs,
        source_logprobs=logprobs,
        advantage=advantage,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_joined_policy_learns_saves_and_exports_as_any(
    dtype: str, qwen: Path, tmp_path: Path
) -> None:
    """Two updates with a KL term and a pause (all but the resident weights parked) between them, a
    checkpoint on disk, an export: bit for bit what they are without. The joined product sees both
    updates, and what a checkpoint puts back."""
    agent = AgentConfig(
        name="a", model=str(qwen), learning_rate=1e-2, dtype=dtype, offload="optimizer"
    )
    policies, loaded = [], []
    for join in (False, True):
        policy = Policy(agent, device="cpu", temperature=1.0, beta=0.1)
        products = Joined(policy.model) if join else None
        start = policy.checkpoint(0)
        for advantage in (1.0, -0.5):
            assert not policy.update([one_sample(policy, advantage)], LOSS, UPDATE).skipped
            policy.offload()
        if products:
            assert len(products.groups) == 2 * 2
            for snapshot in (policy.checkpoint(2), start, policy.checkpoint(2)):
                policy.restore(snapshot)
                plain = logits(policy.model)
                with products.on():
                    assert torch.allclose(logits(policy.model), plain, atol=TOLERANCE[dtype])
        shelf = Checkpoints(tmp_path / f"shelf{join}", keep=1)
        shelf.save(policy.checkpoint(2))
        policy.export(tmp_path / f"model{join}")
        policies.append(shelf.load(2))
        loaded.append(AutoModelForCausalLM.from_pretrained(tmp_path / f"model{join}").state_dict())
    one, two = policies
    assert all(torch.equal(t, two.model[n]) for n, t in one.model.items())
    assert all(torch.equal(t, two.optimizer[n]) for n, t in one.optimizer.items())
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(t, loaded[1][n]) for n, t in loaded[0].items())
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, loaded[1][name])
