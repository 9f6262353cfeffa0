"""A first forward without a graph: on a CPU its products serve the survivors."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ratio_rows import PEERS, UPDATE, algorithm, assert_equal_state, learn, policy, rows
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hacrl.policy import policy as policy_module
from hacrl.policy.gradients import GradientPass
from hacrl.policy.policy import Policy
from hacrl.types import Sample


def drafts_of(p: Policy, samples: list[Sample], **settings) -> str:
    """Passes of an update through the model: d without a graph, g with one."""
    order = []
    hook = p.model.model.norm.register_forward_hook(
        lambda *a: order.append("g" if a[2].requires_grad else "d")
    )
    learn(p, samples, update=PEERS, **settings)
    hook.remove()
    return "".join(order)


def test_experts_are_never_drafted(llama: Path, tmp_path: Path) -> None:
    """Their matrices are in no linear layer: a second forward would multiply all of it again, and might
    choose other experts."""
    torch.manual_seed(0)
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    words = json.loads((llama / "config.json").read_text())["vocab_size"]
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=words, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16,
            num_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
            initializer_range=0.2,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    pruned, plain = (policy(tmp_path, prune=prune) for prune in (True, False))
    assert pruned.logprobs.packs
    samples = rows(plain)
    assert drafts_of(pruned, samples) == "gg"  # all rows, and the survivors
    learn(plain, samples, update=PEERS)
    assert_equal_state(pruned, plain)


class Experts(nn.Module):
    """Plain linear layers, each for some of the tokens."""

    def __init__(self, product: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = product, copy.deepcopy(product)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        to_first = flat[:, 0] > 0
        found = flat.new_zeros(len(flat), self.first.out_features)
        found[to_first] = self.first(flat[to_first])
        found[~to_first] = self.second(flat[~to_first])
        return found.unflatten(0, hidden.shape[:2])


class Twice(nn.Module):
    """A layer that is used twice, before another."""

    def __init__(self, product: nn.Linear) -> None:
        super().__init__()
        self.product, self.mixing = product, nn.Linear(product.in_features, product.in_features)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.mixing(self.mixing(hidden))
        return self.product(hidden + 0.1 * mixed)


class Scaled(nn.Linear):
    """A linear layer that works in another way than torch's."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, 1.5 * self.weight, self.bias)


def odd(model: nn.Module) -> None:
    """Layers used twice, shared by two blocks, with bias, with tied weights, with a hook."""
    for layer in model.model.layers:
        layer.self_attn.o_proj = Twice(layer.self_attn.o_proj)
    first, second = model.model.layers
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    second.mlp.gate_proj = first.mlp.gate_proj
    first.mlp.down_proj.register_forward_hook(lambda module, given, found: found * 1.3)


def with_experts(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Experts(layer.mlp.up_proj)


def with_another_linear(model: nn.Module) -> None:
    for layer in model.model.layers:
        own = layer.mlp.up_proj
        layer.mlp.up_proj = Scaled(own.in_features, own.out_features, bias=True)


@pytest.mark.parametrize("scouts", [True, False])
@pytest.mark.parametrize("change", [odd, with_experts, with_another_linear])
def test_unusual_models_are_pruned_rightly(llama: Path, change, scouts: bool, monkeypatch) -> None:
    load = policy_module.load_model

    def changed(*arguments, **named):
        model = load(*arguments, **named)
        torch.manual_seed(1)
        change(model)
        return model

    monkeypatch.setattr(policy_module, "load_model", changed)
    monkeypatch.setattr(GradientPass, "scouts", scouts)
    pruned, plain = (policy(llama, prune=prune, microbatch_tokens=60) for prune in (True, False))
    samples = rows(plain)
    for _ in range(2):
        thin = scouts or change is not with_another_linear
        assert ("d" in drafts_of(pruned, samples)) == thin
        report = learn(plain, samples, update=PEERS)
        assert report.grad_norm > 1e-3
        assert_equal_state(pruned, plain)
        plain.restore(pruned.checkpoint(1))
    assert not any("forward" in vars(module) for module in pruned.model.modules())


def test_after_an_error_no_layer_is_left_changed(llama: Path) -> None:
    p = policy(llama)
    samples = rows(p)

    def fail(*_):
        raise ValueError("in the middle")

    p.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        learn(p, samples, update=PEERS)
    assert not any("forward" in vars(module) for module in p.model.modules())


# ---------------------------------------------------------------- what it costs, and when it is made


def test_without_a_graph_no_product_is_made_in_vain(llama: Path) -> None:
    """Of ten rows like one another four are dead. Counted in products of the decoder's and the head's
    matrices: a live row takes three of the former (forward, and two backward) and four of the latter
    (its forward twice); a dead one three and one, pruned one and one."""
    costs = {}
    for prune in (True, False):
        p = policy(llama, prune=prune)
        samples = [
            replace(
                s,
                token_ids=s.token_ids[-7:],
                loss_mask=(0, 0, 1, 1, 1, 1, 1),
                old_logprobs=None,
                source_logprobs=None,
            )
            for s in rows(p, [(True, 1.0, 1.0)] * 10)
        ]
        scores = p.score([(s.token_ids[:2], s.token_ids[2:]) for s in samples])
        for i, score in enumerate(scores):
            before = sum(score) / 5 - (math.log(1.5) if i < 4 else 0)
            samples[i] = replace(samples[i], behaviour=before)
        with FlopCounterMode(display=False) as counter:
            report = learn(p, samples, "gspo", PEERS)
        costs[prune] = counter.get_total_flops()
        assert report.pruned_backward == 4 * prune
    head = 258 * 32 * 5 / 7  # scored tokens alone
    decoder = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    live = 6 * (3 * decoder + 4 * head)
    wanted = (live + 4 * (decoder + head)) / (live + 4 * (3 * decoder + head))
    assert costs[True] / costs[False] == pytest.approx(wanted, abs=0.01)


def test_once_nearly_all_survive_a_graph_is_built_at_once(llama: Path) -> None:
    p = policy(llama, microbatch_tokens=40)
    samples = rows(p, [(True, 1.0, 1.0)] * 9)
    with_graph = []
    p.model.model.norm.register_forward_hook(lambda *a: with_graph.append(a[2].requires_grad))
    learn(p, samples, update=PEERS)
    assert with_graph == [False, True, True, True]  # a first forward, its survivors, two more
    samples = rows(p, [(True, 1.0, 1.0)] * 9)  # at the new weights
    with_graph.clear()
    learn(p, samples, update=PEERS)
    assert with_graph == [True, True, True]  # the update before is remembered


def test_a_resumed_policy_expects_what_it_would_have(llama: Path) -> None:
    """The share of tokens of rows with a gradient, of peers' and of own rows apart."""
    one, other = policy(llama), policy(llama)
    assert one.survived == {}
    samples = rows(one, [(False, 0.9, 1.2)] * 3 + [(False, 0.3, 0.6)])
    total = sum(len(s.token_ids) for s in samples)
    learn(one, samples, update=PEERS)
    share = (total - len(samples[3].token_ids)) / total
    assert one.survived == {"peers": share} and 0.5 < share < 1
    learn(one, rows(one, [(True, 1.0, 1.0)] * 3), update=replace(UPDATE, part="own"))
    assert one.survived == {"peers": share, "own": 1.0}
    other.restore(one.checkpoint(1))
    assert other.survived == one.survived
    old = one.checkpoint(1)
    del old.state["survived"]  # a checkpoint of before
    other.restore(old)
    assert other.survived == {}


def test_what_tells_nothing_of_updates_is_not_remembered(llama: Path) -> None:
    """A gradient for diagnostics, an update that is skipped or goes nowhere, one that prunes nothing."""
    p, plain = policy(llama), policy(llama, prune=False)
    method, samples = algorithm(), rows(p)
    p.gradient(samples, range(12), method.loss, PEERS)
    learn(p, rows(p, [(False, 0.9, 0.0)] * 3), update=PEERS)
    assert learn(p, [replace(samples[5], advantage=float("nan"))], update=PEERS).skipped
    learn(plain, samples, update=PEERS)
    assert p.survived == {} == plain.survived
    learn(p, samples, update=PEERS)
    before = dict(p.survived)
    p.gradient(samples, range(3), method.loss, PEERS)
    assert p.survived == before and 0 < before["peers"] < 1


@pytest.mark.parametrize(("share", "graph"), [(0.7, False), (0.8, True)])
def test_on_a_cpu_drafts_pay_below_three_quarters(llama: Path, share: float, graph: bool) -> None:
    p = policy(llama)
    p.survived["peers"] = share
    samples, order = rows(p), []
    p.model.model.norm.register_forward_hook(lambda *a: order.append(a[2].requires_grad))
    learn(p, samples, update=PEERS)
    assert order[0] == graph


def test_a_pass_that_is_over_keeps_no_graph(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = []
    finish = GradientPass._finish

    def finish_watched(self, begun):
        found = finish(self, begun)
        finished.append(begun)
        return found

    monkeypatch.setattr(GradientPass, "_finish", finish_watched)
    for update in (UPDATE, PEERS):
        p = policy(llama)
        learn(p, rows(p), update=update)
    assert len(finished) == 2
    assert all(b.draft is None and b.logprobs_BT is None for b in finished)


def test_a_layer_whose_result_is_changed_in_place_is_multiplied_again(llama: Path) -> None:
    drafting, plain = policy(llama), policy(llama, prune=False)
    for p in (drafting, plain):
        p.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: a[2].mul_(1.1))
    samples = rows(plain)
    for p in (drafting, plain):
        report = learn(p, samples, update=PEERS)
    assert_equal_state(drafting, plain)
    assert report.grad_norm > 1e-3
