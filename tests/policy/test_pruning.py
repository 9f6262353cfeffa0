"""Leaving out what is exactly zero changes time, never an update."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ratio_rows import rows_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hacrl
from hacrl.algorithms import ALGORITHMS, make_algorithm, skips_zero_advantage
from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.capability import Capability
from hacrl.config import AgentConfig
from hacrl.metrics import learning_metrics
from hacrl.plan import Plan
from hacrl.policy import reuse, weights
from hacrl.policy.policy import Policy
from hacrl.policy.update import Pass, UpdateReport, repeat_pays, share, survivors
from hacrl.types import Batch, Sample, Update

UPDATE = Update(0, 2, 0.8, "mixed", ("p0", "p1"))
PEERS = replace(UPDATE, part="peers")  # begins without a graph
WIDE = {"epsilon_low": 0.1, "epsilon_high": 0.1}

# (own, s, advantage): what the learner makes of each row at the weights below. With the clip at 0.1
# and the floor at 0.8, hacpo leaves no gradient to the rows marked dead.
SPECS = [
    (True, 1.0, 1.0),
    (True, 1.5, 1.0),  # dead: above the clip, and good
    (True, 0.5, -1.0),  # dead: below the clip, and bad
    (True, 1.0, 0.0),  # advantage 0
    (True, 0.5, 0.7),
    (False, 0.9, 1.2),
    (False, 1.3, 1.0),  # dead: above 1
    (False, 0.5, -1.0),  # dead: below the floor
    (False, 0.9, 0.0),  # advantage 0
    (False, 0.85, -0.8),
    (False, 2.0, -0.4),  # dead: above 1
    (False, 0.3, 0.6),  # dead: below the floor
]
DEAD, NOTHING = 6, 2


def policy(model: Path, beta: float = 0.0, **changes) -> Policy:
    settings = {"name": "a", "model": str(model), "learning_rate": 1e-3, **changes}
    return Policy(AgentConfig(**settings), device="cpu", temperature=1.0, beta=beta)


def rows(p: Policy, specs=SPECS) -> list[Sample]:
    return rows_of(p, specs)


def algorithm(name: str = "hacpo", **settings):
    return make_algorithm(AlgorithmSettings(name=name, **{**WIDE, **settings}), (0.0, 1.0))


def learn(
    p: Policy, samples: list[Sample], name: str = "hacpo", update: Update = UPDATE, **settings
) -> UpdateReport:
    method = algorithm(name, **settings)
    skips = skips_zero_advantage(method)
    return p.update(samples, method.loss, update, zero_advantage_is_zero_loss=skips)


def assert_equal_state(a: Policy, b: Policy) -> None:
    """Gradients, weights, moments and counts of steps, to float tolerance."""
    for name, parameter in a.master.items():
        other = b.master[name]
        assert torch.allclose(parameter.grad, other.grad, atol=1e-6, rtol=0)
        one, two = a.optimizer.state[parameter], b.optimizer.state[other]
        assert one["step"] == two["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(one[key], two[key], atol=1e-6, rtol=0)
    assert a.updates_made == b.updates_made


# ---------------------------------------------------------------- equal with and without


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "update"), [(16384, UPDATE), (40, UPDATE), (40, PEERS)])
def test_gradient_and_optimizer_are_the_same(
    llama: Path, name: str, beta: float, tokens: int, update: Update
) -> None:
    """In one micro-batch and in several, which the survivors' lengths cut anew; and with a first
    forward that builds no graph."""
    pruned, plain = (
        policy(llama, beta, prune=prune, microbatch_tokens=tokens) for prune in (True, False)
    )
    samples = rows(plain)
    for _ in range(2):  # the second update meets moments, and a KL that is not zero
        one, two = (learn(p, samples, name, update, beta=beta) for p in (pruned, plain))
        assert one.loss == pytest.approx(two.loss, abs=1e-6)
        assert one.grad_norm == pytest.approx(two.grad_norm, abs=1e-6, rel=1e-6)
        assert one.kl == pytest.approx(two.kl, abs=1e-6)
        assert_equal_state(pruned, plain)
        assert two.pruned_forward == two.pruned_backward == 0
        for s, mine, theirs in zip(samples, one.ratios, two.ratios, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6) if mine is not None else not s.advantage
        # AdamW can make whole steps of what is rounding in gradients: go on from the same weights.
        plain.restore(pruned.snapshot(1))
    assert one.grad_norm > 1e-3


@pytest.mark.parametrize("update", [UPDATE, PEERS])
@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_the_same_with_checkpointing_and_adapters(
    llama: Path, changes: dict, update: Update
) -> None:
    pruned, plain = (policy(llama, prune=prune, **changes) for prune in (True, False))
    samples = rows(plain)
    for _ in range(2):
        reports = [learn(p, samples, update=update) for p in (pruned, plain)]
        assert_equal_state(pruned, plain)
        assert reports[0].pruned_backward > 0
        plain.restore(pruned.snapshot(1))


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


# ---------------------------------------------------------------- what is left out


def test_hacpo_leaves_out_what_has_no_gradient(llama: Path) -> None:
    """Two rows have advantage 0; of the other ten six are dead (SPECS), and four survive: fewer
    than 0.6 of the tokens, so they go backward alone."""
    p = policy(llama)
    report = learn(p, rows(p))
    assert (report.pruned_forward, report.pruned_backward) == (NOTHING, DEAD)
    unknown = [i for i, (_, _, advantage) in enumerate(SPECS) if advantage == 0]
    assert [i for i, r in enumerate(report.ratios) if r is None] == unknown
    assert [i for i, u in enumerate(report.used) if u is None] == unknown


def test_the_kl_term_wants_every_own_row(llama: Path) -> None:
    """All rows go forward. Away from the start weights KL has a gradient at all five own rows; of
    the seven peers five have none: two above 1, two below the floor, one of advantage 0."""
    p = policy(llama, beta=0.1)
    learn(p, rows(p), beta=0.1)
    report = learn(p, rows(p), beta=0.1)
    assert report.kl > 0
    assert None not in report.ratios
    assert (report.pruned_forward, report.pruned_backward) == (0, 5)


def test_without_own_rows_there_is_no_kl_and_no_second_model(llama: Path) -> None:
    """The KL term is of own samples: an update of peers alone is the one without the term, down to the
    rows of advantage 0, and the start weights are not asked."""
    with_term, without = policy(llama, beta=0.1), policy(llama)
    learn(with_term, rows(with_term), beta=0.1)  # away from the start weights
    without.restore(with_term.snapshot(1))
    samples = [s for s in rows(without) if not s.is_own]
    asked = []
    with_term._start.model.model.register_forward_hook(lambda *a: asked.append(a))
    one = learn(with_term, samples, update=PEERS, beta=0.1)
    two = learn(without, samples, update=PEERS)
    assert_equal_state(with_term, without)
    assert (one.kl, one.pruned_forward) == (0.0, 1) and one.pruned_forward == two.pruned_forward
    assert not asked
    learn(with_term, rows(with_term), beta=0.1)
    assert asked


def test_a_row_of_tokens_survives_by_one_of_them(llama: Path) -> None:
    """grpo, clip 0.28 above: of the first row every token is at 1.5, of the second the last one is
    back at 1, of the third (long: most of the micro-batch) every one is at 1.5."""
    p = policy(llama)
    samples = rows(p, [(True, 1.5, 1.0)] * 3)
    old = samples[1].old_logprobs
    assert old is not None
    samples[1] = replace(samples[1], old_logprobs=(*old[:-1], old[-1] + math.log(1.5)))
    report = learn(p, samples, "grpo")
    assert report.used == (False, True, False)
    assert report.pruned_backward == 2
    assert report.grad_norm > 0


def test_many_survivors_go_backward_with_the_rest(llama: Path) -> None:
    """Nine of ten alive: a second pass would cost more than it saves."""
    p = policy(llama)
    report = learn(p, rows(p, [(True, 1.0, 1.0)] * 9 + [(True, 1.5, 1.0)]))
    assert report.pruned_backward == 0


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
    assert "dd" in drafts_in_a_row and drafts_in_a_row.startswith("dg")


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


def test_survivors_and_when_a_second_pass_pays() -> None:
    """Padding does not count, nan does. Worth it below 0.6 of the tokens."""
    nan = float("nan")
    gradient = torch.tensor([[0.0, 1e-30], [0.0, 0.0], [0.0, 3.0], [nan, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert survivors(gradient, mask).tolist() == [True, False, False, True]
    assert repeat_pays(share([59, 41], [True, False]))
    assert not repeat_pays(share([60, 40], [True, False]))
    assert repeat_pays(share([60, 40], [False, False]))


# ---------------------------------------------------------------- nothing left


@pytest.mark.parametrize("spec", [(True, 1.5, 1.0), (True, 1.0, 0.0)])
def test_with_all_rows_left_out_the_optimizer_steps_all_the_same(llama: Path, spec) -> None:
    """From fresh moments a zero gradient leaves weight decay alone: w * (1 - lr * decay). After an
    update with a gradient the moments shrink by 0.9 and 0.999 and still move the weights."""
    fresh = policy(llama, weight_decay=0.5)
    before = {n: m.detach().clone() for n, m in fresh.master.items()}
    report = learn(fresh, rows(fresh, [spec] * 4))
    assert report.pruned_forward + report.pruned_backward == 4
    assert not report.skipped
    assert report.grad_norm == 0
    assert fresh.updates_made == 1
    for name, parameter in fresh.master.items():
        assert torch.allclose(parameter, before[name] * (1 - 1e-3 * 0.5), atol=1e-7)

    pruned, plain = (policy(llama, prune=prune) for prune in (True, False))
    samples = rows(plain)
    learn(pruned, samples)
    plain.restore(pruned.snapshot(1))
    moments = {n: pruned.optimizer.state[m]["exp_avg"].clone() for n, m in pruned.master.items()}
    for p in (pruned, plain):
        learn(p, rows(p, [spec] * 4))
    assert_equal_state(pruned, plain)
    for name, parameter in pruned.master.items():
        state = pruned.optimizer.state[parameter]
        assert state["step"] == 2
        assert torch.allclose(state["exp_avg"], 0.9 * moments[name], atol=1e-8)


# ---------------------------------------------------------------- what algorithms declare


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if skips_zero_advantage(algorithm(n))])
def test_what_is_declared_of_advantage_zero_is_true(name: str) -> None:
    """Anywhere, not only near ratio 1: no gradient at such rows, and none of it elsewhere."""
    method = algorithm(name)
    generator = torch.Generator().manual_seed(0)
    logprobs, old, source = (
        -3 * torch.rand(6, 5, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    whole = Batch(
        logprobs_BT=logprobs.requires_grad_(),
        mask_BT=torch.ones(6, 5),
        behaviour_B=source.mean(1),
        old_logprobs_BT=old,
        ref_logprobs_BT=None,
        advantage_B=torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 1.0], dtype=torch.float64),
        weight_B=torch.full((6,), 1.3, dtype=torch.float64),
        is_own_B=torch.tensor([True, True, False, False, True, False]),
        num_samples=6,
        num_own=3,
        num_tokens=30,
        num_own_tokens=15,
        source_logprobs_BT=source,
    )
    kept = whole.advantage_B != 0
    part = replace(
        whole,
        **{
            key: value[kept].detach()
            for key, value in vars(whole).items()
            if isinstance(value, torch.Tensor)
        },
    )
    part.logprobs_BT.requires_grad_()
    losses = [method.loss(batch, UPDATE).loss for batch in (whole, part)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    gradient, rest = (
        torch.autograd.grad(loss, batch.logprobs_BT)[0]
        for loss, batch in zip(losses, (whole, part), strict=True)
    )
    assert not gradient[~kept].any()
    assert torch.allclose(gradient[kept], rest, atol=1e-12)


def test_another_loss_must_declare_for_itself(llama: Path) -> None:
    """A term that does not care for the advantage, in a class that inherits the declaration: its
    rows are not left out."""

    class Imitating(Gspo):
        def loss(self, batch, update):
            output = super().loss(batch, update)
            return replace(output, loss=output.loss - batch.logprobs_BT.sum() / batch.num_tokens)

    class Renamed(Gspo):
        pass

    settings = AlgorithmSettings(name="gspo", **WIDE)
    assert skips_zero_advantage(Renamed(settings, (0.0, 1.0)))
    method = Imitating(settings, (0.0, 1.0))
    assert not skips_zero_advantage(method)
    p = policy(llama)
    report = p.update(rows(p, [(True, 1.0, 0.0)] * 4), method.loss, UPDATE)
    assert (report.pruned_forward, report.pruned_backward) == (0, 0)
    assert report.grad_norm > 1e-3


# ---------------------------------------------------------------- what is told


def test_means_are_over_the_rows_that_were_seen() -> None:
    """Own: s 1.0 and unknown. Peers: 0.7 (below 0.8, so not used), 0.9 and unknown: half of the two
    known are below the floor and half are used; 0.9 alone carries weight, worth one sample."""
    blank = Sample("p", 0, "a", True, (1, 2), (0, 1), -0.5, advantage=1.0)
    peer = replace(blank, source="b", is_own=False)
    batch = [
        blank,
        replace(blank, advantage=0.0),
        peer,
        replace(peer, token_ids=(1, 2, 3), loss_mask=(0, 1, 1)),
        replace(peer, advantage=0.0),
    ]
    report = UpdateReport(
        loss=0.1,
        grad_norm=0.2,
        kl=0.0,
        skipped=False,
        ratios=(1.0, None, 0.7, 0.9, None),
        used=(True, None, False, True, None),
        learning_rate=1e-3,
        pruned_forward=2,
        pruned_backward=1,
    )
    capability = Capability({("a", ""): 0.5, ("b", ""): 0.5})
    plan = Plan(1, (("mixed", 1),), (0.8,))
    told = learning_metrics([(UPDATE, batch, report)], plan, capability, ("a", "b"), "a")
    wanted = {
        "pruned/forward": 2,
        "pruned/backward": 1,
        "own/samples": 2,
        "own/advantage_zero": 0.5,
        "own/ratio": 1.0,
        "own/clipped": 0.0,
        "peers/samples": 3,
        "peers/forwarded": 2,
        "peers/below_floor": 0.5,
        "peers/used": 0.5,
        "peers/effective_samples": 1.0,
        "ratio/b": 0.8,
        "ratio/b/short": 0.7,
        "ratio/b/long": 0.9,
    }
    assert {key: told[key] for key in wanted} == pytest.approx(wanted)

    unseen = replace(report, ratios=(None,) * 5, used=(None,) * 5)
    told = learning_metrics([(UPDATE, batch, unseen)], plan, capability, ("a", "b"), "a")
    assert told["peers/forwarded"] == 0
    for key in ("own/ratio", "peers/used", "peers/below_floor", "ratio/b", "ratio/b/long"):
        assert told[key] is None


def test_a_run_with_and_without(tmp_path: Path) -> None:
    """A step of two agents: the same losses, and null in the samples file exactly where the
    advantage is 0 and nothing went forward, as often as the metrics say."""
    told = {}
    for prune in (True, False):
        config = {
            "steps": 1,
            "prompts_per_step": 6,
            "samples_per_prompt": 2,
            "minibatch_samples": 12,
            "max_prompt_tokens": 64,
            "max_response_tokens": 24,
            "task": {"kind": "arithmetic"},
            "verifier": {"kind": "number", "workers": 0},
            "evaluation": {"every": 0, "problems": 2},
            "runtime": {"threads": 1, "device": "cpu"},
            "log": {"tensorboard": False},
            "agents": [
                {"name": n, "model": f"pocket:{n}", "learning_rate": 2e-4, "prune": prune}
                for n in ("wren", "finch")
            ],
        }
        run = hacrl.train(config, tmp_path / f"prune-{prune}")
        told[prune] = [row for row in run.metrics() if row["kind"] == "train"]
        for row in told[prune]:
            path = run.path / f"samples/{row['agent']}/step-{row['step']:06d}.jsonl"
            stored = [json.loads(line) for line in path.read_text().splitlines()]
            nothing = [s["advantage"] == 0 for s in stored]
            assert [s["ratio"] is None for s in stored] == [prune and n for n in nothing]
            assert [s["used"] is None for s in stored] == [prune and n for n in nothing]
            assert row["pruned/forward"] == prune * sum(nothing)
    assert sum(row["pruned/forward"] for row in told[True]) > 0
    assert sum(row["pruned/backward"] for row in told[True]) > 0
    for one, two in zip(told[True], told[False], strict=True):
        for key in ("loss", "grad_norm", "reward", "updates", "learning_rate"):
            assert one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-6)
