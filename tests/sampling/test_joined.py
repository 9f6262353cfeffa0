"""Joined linear layers: forward passes, and parameters that became views."""

from pathlib import Path

import pytest
import torch
from ratio_rows import learn, rows_of
from ratio_rows import policy as make_policy
from small_models import model_of as small_model
from torch import nn

from hacrl.config_agent import LoraSettings
from hacrl.policy.lora import add_adapter
from hacrl.sampling import joined as joined_module
from hacrl.sampling.joined import Joined

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
    """Seven products in each of 3 layers and the head; joined, four. Each parameter may change in
    place, as an update writes them one after the other."""
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
    for _, members in joined.siblings[2:4]:  # of the second layer
        for parameter in (p for member in members.values() for p in member.parameters()):
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
    for model in (adapted, model_of("gpt2")):
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


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.05)])
def test_updates_and_checkpoints_stay_the_same(dtype: str, tolerance: float, qwen: Path) -> None:
    """Two updates with a KL term and offloading after each are equal bit for bit with and without
    joining. The joined product sees updates and restored weights."""
    stored = []
    for join in (False, True):
        policy = make_policy(qwen, 0.1, learning_rate=1e-2, dtype=dtype, offload="optimizer")
        joined = Joined(policy.model) if join else None
        start = policy.checkpoint(0)
        for advantage in (1.0, -0.5):
            assert not learn(policy, rows_of(policy, [(True, 1.0, advantage)]), beta=0.1).skipped
            policy.offload()
        stored.append(policy.checkpoint(2))
        for checkpoint in (stored[-1], start) if joined else ():
            policy.restore(checkpoint)
            plain = logits(policy.model)
            with joined.on():
                assert torch.allclose(logits(policy.model), plain, atol=tolerance)
    one, two = stored
    assert all(torch.equal(t, two.model[n]) for n, t in one.model.items())
    assert all(torch.equal(t, two.optimizer[n]) for n, t in one.optimizer.items())
