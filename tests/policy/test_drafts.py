"""A first forward without a graph: its products serve the survivors; on a GPU one is begun ahead."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ratio_rows import PEERS, UPDATE, algorithm, assert_equal_state, learn, policy, rows
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hacrl.policy import reuse, weights
from hacrl.policy.policy import Policy
from hacrl.policy.update import Pass
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


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("change", [odd, with_experts, with_another_linear])
def test_unusual_models_are_pruned_rightly(llama: Path, change, ahead: bool, monkeypatch) -> None:
    load = weights.load_model

    def changed(*arguments, **named):
        model = load(*arguments, **named)
        torch.manual_seed(1)
        change(model)
        return model

    monkeypatch.setattr(weights, "load_model", changed)
    monkeypatch.setattr(Policy, "works_ahead", ahead)
    pruned, plain = (policy(llama, prune=prune, microbatch_tokens=60) for prune in (True, False))
    samples = rows(plain)
    for _ in range(2):
        assert ("d" in drafts_of(pruned, samples)) == (change is not with_another_linear)
        report = learn(plain, samples, update=PEERS)
        assert report.grad_norm > 1e-3
        assert_equal_state(pruned, plain)
        plain.restore(pruned.snapshot(1))
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
    other.restore(one.snapshot(1))
    assert other.survived == one.survived
    old = one.snapshot(1)
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


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_draft_ahead_changes_nothing(
    llama: Path, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: from the second draft on, a micro-batch's survivors go forward again after the next
    one's draft. Gradients are those of an update without pruning."""
    monkeypatch.setattr(Policy, "works_ahead", True)
    pruned, plain = (policy(llama, beta, prune=p, microbatch_tokens=60) for p in (True, False))
    samples = rows(plain)
    order = []
    pruned.model.model.norm.register_forward_hook(lambda *a: order.append(a[2].requires_grad))
    one, two = (learn(p, samples, update=PEERS, beta=beta) for p in (pruned, plain))
    assert_equal_state(pruned, plain)
    assert one.loss == pytest.approx(two.loss, abs=1e-6) and one.pruned_backward > 0
    for mine, theirs in zip(one.ratios, two.ratios, strict=True):
        assert mine is None or mine == pytest.approx(theirs, abs=1e-6)
    drafts_in_a_row = "".join("g" if graph else "d" for graph in order)
    assert drafts_in_a_row.startswith("dg") and "dd" in drafts_in_a_row


def test_ahead_there_is_never_a_graph_beside_a_draft(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first micro-batch (the longest rows) some survive, then all: once that is seen, the waiting
    draft is finished before a graph is built."""
    monkeypatch.setattr(Policy, "works_ahead", True)
    p = policy(llama, microbatch_tokens=40)
    alive: list[Pass] = []
    seen, sizes = [], []
    begin, finish = Policy._begin, Policy._finish

    def begin_watched(self, *arguments):
        begun = begin(self, *arguments)
        alive.append(begun)
        seen.append("".join("d" if a.draft else "g" for a in alive))
        sizes.append(begun.tokens)
        return begun

    def finish_watched(self, begun):
        alive.remove(begun)
        return finish(self, begun)

    monkeypatch.setattr(Policy, "_begin", begin_watched)
    monkeypatch.setattr(Policy, "_finish", finish_watched)
    dead, live = (False, 0.5, -1.0), (False, 0.9, 1.2)
    learn(p, rows(p, [live] * 15 + [dead]), update=PEERS)
    assert "dd" in seen and seen[-1] == "g"
    assert set(seen) <= {"d", "dd", "g"}
    largest = {
        kind: max(n for s, n in zip(seen, sizes, strict=True) if s[-1] == kind) for kind in "dg"
    }
    assert largest["d"] <= 30 < largest["g"] <= 40  # graphs are of full size again
    assert not alive


@pytest.mark.parametrize("specs", ["live long", "live short", "dead long"])
@pytest.mark.parametrize("tokens", [17, 40, 60])
def test_ahead_there_is_no_more_than_one_graph_may_keep(
    llama: Path, specs: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Survivors' tokens and 0.57 of those of drafts beside them, however rows are long (up to 17 tokens)
    and survivors distributed. Where more survive than expected they go forward anew; rows longer than
    three quarters of a micro-batch need not, since no draft is begun beside them."""
    monkeypatch.setattr(Policy, "works_ahead", True)
    dead, live = (False, 0.5, -1.0), (False, 0.9, 1.2)
    made = {
        "live long": [dead] * 5 + [live] * 5,
        "live short": [live] * 5 + [dead] * 5,
        "dead long": [live, dead] * 4 + [dead] * 2,
    }[specs]
    p, plain = (policy(llama, prune=x, microbatch_tokens=tokens) for x in (True, False))
    samples = rows(plain, made)
    begun: list[Pass] = []
    kept: list[float] = []
    anew: list[object] = []
    begin, finish, again = Policy._begin, Policy._finish, reuse.Draft.again

    def drafts() -> float:
        return 0.57 * sum(one.tokens for one in begun)

    def begin_watched(self, *arguments):
        begun.append(begin(self, *arguments))
        if begun[-1].draft:
            kept.append(drafts())
        return begun[-1]

    def finish_watched(self, one):
        begun.remove(one)
        return finish(self, one)

    def again_watched(self, rows_kept, inputs):
        kept.append(sum(inputs.lengths) + drafts())
        return again(self, rows_kept, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "_begin", begin_watched)
        patch.setattr(Policy, "_finish", finish_watched)
        patch.setattr(Policy, "_pass_again", lambda *a: anew.append(a) or again_pass(*a))
        patch.setattr(reuse.Draft, "again", again_watched)
        learn(p, samples, update=PEERS)
    learn(plain, samples, update=PEERS)
    assert_equal_state(p, plain)
    assert 0 < max(kept) <= tokens
    if tokens == 17 and specs == "live long":
        assert not anew


again_pass = Policy._pass_again


def test_survivors_that_have_no_room_beside_a_draft_go_forward_anew(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 100 tokens, of which a draft of 50 beside takes 28.5, leave 71.5: rows of 40, 30 and 1
    find room, one of 20 does not; with nothing beside all do."""
    p = policy(llama, microbatch_tokens=100)
    inputs = SimpleNamespace(lengths=(40, 30, 20, 1))
    begun = SimpleNamespace(inputs=inputs, beside=50)
    assert p._room(begun, [0, 1, 2, 3]) == ([0, 1, 3], [2])
    assert p._room(begun, [2, 3]) == ([2, 3], [])
    begun.beside = 0
    assert p._room(begun, [0, 1, 2, 3]) == ([0, 1, 2, 3], [])

    monkeypatch.setattr(Policy, "works_ahead", True)
    pruned, plain = (policy(llama, prune=x, microbatch_tokens=60) for x in (True, False))
    pruned.survived["peers"] = 0.5
    samples = rows(plain, [(False, 0.9, 1.2)] * 12)
    used: list[int] = []
    anew: list[int] = []
    again = reuse.Draft.again
    with monkeypatch.context() as patch:
        patch.setattr(
            reuse.Draft, "again", lambda d, kept, i: used.append(len(kept)) or again(d, kept, i)
        )
        patch.setattr(Policy, "_pass_again", lambda *a: anew.append(len(a[1])) or again_pass(*a))
        report = learn(pruned, samples, update=PEERS)
    learn(plain, samples, update=PEERS)
    assert_equal_state(pruned, plain)
    assert used and 0 < sum(anew) < 6 and report.pruned_backward == 0


def test_a_pass_that_is_over_keeps_no_graph(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = []
    finish = Policy._finish

    def finish_watched(self, begun):
        found = finish(self, begun)
        finished.append(begun)
        return found

    monkeypatch.setattr(Policy, "_finish", finish_watched)
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
