"""Joined linear layers: forward passes, and parameters that became views."""

import copy
from pathlib import Path

import pytest
import torch
from ratio_rows import policy as make_policy
from ratio_rows import rows_of
from small_models import model_of as small_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config_agent import LoraSettings
from hacrl.policy.lora import add_adapter
from hacrl.sampling import joined as joined_module
from hacrl.sampling.joined import Joined
from hacrl.store.checkpoint import Checkpoints
from hacrl.types import Update

FAMILIES = ["tied", "qwen2", "qwen", "gemma3"]
LOSS = make_algorithm(make_settings("gspo", beta=0.1)).loss
UPDATE = Update(0, 0.8, "own", ("p",))


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


def linear_calls(model) -> int:
    """Number of products in a forward pass."""
    calls, plain = [], nn.functional.linear

    def counted(input, weight, bias=None):
        calls.append(weight)
        return plain(input, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", counted)
        patch.setattr(joined_module, "linear", counted)
        logits(model)
    return len(calls)


def addresses(model) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_joined_forward_equals_the_plain_one(family: str) -> None:
    """Seven products in each of 3 layers and the head; joined, four."""
    model = model_of(family)
    plain, names = logits(model), list(model.state_dict())
    joined = Joined(model)
    assert torch.equal(logits(model), plain)
    assert linear_calls(model) == 7 * 3 + 1
    with joined.on():
        assert torch.allclose(logits(model), plain, atol=1e-6, rtol=1e-6)
        assert linear_calls(model) == 4 * 3 + 1
    assert list(model.state_dict()) == names
    with pytest.raises(ZeroDivisionError), joined.on():
        raise ZeroDivisionError
    assert linear_calls(model) == 7 * 3 + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_in_place_updates_are_seen(family: str) -> None:
    """Each parameter alone, as an update writes them one after the other."""
    model = model_of(family)
    joined = Joined(model)
    layer = model.model.layers[1]
    members = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    members += [layer.mlp.gate_proj, layer.mlp.up_proj]
    for parameter in (p for m in members for p in m.parameters()):
        before = logits(model)
        with joined.on():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape))
            now = logits(model)
        assert torch.allclose(now, logits(model), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(now, before, atol=1e-4)


def test_layers_that_read_different_inputs_compute_alone() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, own, other):
            return self.q_proj(own), self.k_proj(other), self.v_proj(other)

    module = Cross()
    joined = Joined(module)
    with torch.no_grad():
        for own, other in torch.randn(4, 2, 3, 8):
            wanted = module(own, other)
            with joined.on():
                for one, two in zip(module(own, other), wanted, strict=True):
                    assert torch.allclose(one, two, atol=1e-6)


def test_only_plain_layers_of_one_kind_are_joined() -> None:
    """Not: adapters, other modules, hooks, mixed precision, weights that are tied or share memory."""
    adapted = add_adapter(model_of("qwen"), LoraSettings(rank=2))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=2))
    for model in (adapted, gpt2):
        before = addresses(model)
        with Joined(model).on():
            assert addresses(model) == before
    hooked, mixed, tied, shared = (model_of("tied") for _ in range(4))
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    mixed.model.layers[0].mlp.up_proj.to(torch.bfloat16)
    first, second = (tied.model.layers[i].mlp.up_proj for i in range(2))
    first.weight = second.weight
    first, second = (shared.model.layers[i].mlp.up_proj for i in range(2))
    first.weight.data = second.weight.data
    for model, pairs in ((hooked, 5), (mixed, 5), (tied, 4), (shared, 4)):
        assert len(Joined(model).siblings) == pairs


def test_weights_are_moved_once_and_again_after_a_change_of_device() -> None:
    """A second sampler of the model must not move weights that the graphs of the first one read."""
    model = model_of("qwen2")
    Joined(model)
    places = addresses(model)
    joined = Joined(model)
    assert addresses(model) == places
    model.to(torch.float64).to(torch.float32)  # gives every parameter memory of its own
    plain = logits(model)
    with joined.on():
        assert torch.allclose(logits(model), plain, atol=1e-6, rtol=1e-6)
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight.mul_(0)
        assert not torch.allclose(logits(model), plain, atol=1e-4)


def test_a_copy_of_the_model_has_its_own_weights() -> None:
    model = model_of("tied")
    Joined(model)
    twin, plain = copy.deepcopy(model), logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    assert torch.equal(logits(twin), plain)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.05)])
def test_updates_checkpoints_and_exports_stay_the_same(
    dtype: str, tolerance: float, qwen: Path, tmp_path: Path
) -> None:
    """Two updates with a KL term and offloading after each, a checkpoint on disk and an export are equal
    bit for bit with and without joining. The joined product sees updates and restored weights."""
    stored, loaded = [], []
    for join in (False, True):
        policy = make_policy(qwen, 0.1, learning_rate=1e-2, dtype=dtype, offload="optimizer")
        joined = Joined(policy.model) if join else None
        start = policy.checkpoint(0)
        for advantage in (1.0, -0.5):
            assert not policy.update(
                rows_of(policy, [(True, 1.0, advantage)]), LOSS, UPDATE
            ).skipped
            policy.offload()
        for checkpoint in (policy.checkpoint(2), start, policy.checkpoint(2)) if joined else ():
            policy.restore(checkpoint)
            plain = logits(policy.model)
            with joined.on():
                assert torch.allclose(logits(policy.model), plain, atol=tolerance)
        checkpoints = Checkpoints(tmp_path / f"checkpoints{join}", keep=1)
        checkpoints.save(policy.checkpoint(2))
        policy.export(tmp_path / f"model{join}")
        stored.append(checkpoints.load(2))
        loaded.append(AutoModelForCausalLM.from_pretrained(tmp_path / f"model{join}").state_dict())
    one, two = stored
    assert all(torch.equal(t, two.model[n]) for n, t in one.model.items())
    assert all(torch.equal(t, two.optimizer[n]) for n, t in one.optimizer.items())
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(t, loaded[1][n]) for n, t in loaded[0].items())
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, loaded[1][name])
