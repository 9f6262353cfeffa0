"""Leaving out what is exactly zero changes time, never an update."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ratio_rows import (
    DEAD,
    NOTHING,
    PEERS,
    SPECS,
    UPDATE,
    algorithm,
    assert_equal_state,
    learn,
    policy,
    rows,
)

import hacrl
from hacrl.algorithms import ALGORITHMS
from hacrl.algorithms.capability import Capability
from hacrl.policy.update import UpdateReport, repeat_pays, survivors
from hacrl.training.metrics import learning_metrics
from hacrl.training.plan import Plan
from hacrl.types import MicroBatch, Sample, Update

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
        plain.restore(pruned.checkpoint(1))
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
        plain.restore(pruned.checkpoint(1))


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
    without.restore(with_term.checkpoint(1))
    samples = [s for s in rows(without) if not s.is_own]
    asked = []
    with_term.start_model.model.register_forward_hook(lambda *a: asked.append(a))
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


def test_half_of_them_go_forward_again_on_a_cpu(llama: Path) -> None:
    """Where a GPU would let all go backward; with checkpointing two thirds do as well."""
    p = policy(llama)
    samples = rows(p, [(True, 1.0, 1.0), (True, 1.5, 1.0)] * 5)
    lengths = [len(s.token_ids) for s in samples]
    assert 0.45 < sum(lengths[::2]) / sum(lengths) < 0.6
    assert learn(p, samples).pruned_backward == 5
    p = policy(llama, gradient_checkpointing=True)
    samples = rows(p, [(True, 1.0, 1.0), (True, 1.0, 1.0), (True, 1.5, 1.0)] * 4)
    lengths = [len(s.token_ids) for s in samples]
    assert 0.6 < 1 - sum(lengths[2::3]) / sum(lengths) < 0.7
    assert learn(p, samples).pruned_backward == 4


def test_survivors_and_when_a_second_pass_pays() -> None:
    """Padding does not count, nan does. Worth it below 0.6 of the tokens, on a GPU 0.45."""
    nan = float("nan")
    gradient = torch.tensor([[0.0, 1e-30], [0.0, 0.0], [0.0, 3.0], [nan, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert survivors(gradient, mask).tolist() == [True, False, False, True]
    assert repeat_pays(0.59, "cpu") and not repeat_pays(0.6, "cpu")
    assert repeat_pays(0.44, "cuda") and not repeat_pays(0.45, "cuda")
    assert repeat_pays(0.54, "cuda", True) and not repeat_pays(0.55, "cuda", True)


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
    plain.restore(pruned.checkpoint(1))
    moments = {n: pruned.optimizer.state[m]["exp_avg"].clone() for n, m in pruned.master.items()}
    for p in (pruned, plain):
        learn(p, rows(p, [spec] * 4))
    assert_equal_state(pruned, plain)
    for name, parameter in pruned.master.items():
        state = pruned.optimizer.state[parameter]
        assert state["step"] == 2
        assert torch.allclose(state["exp_avg"], 0.9 * moments[name], atol=1e-8)


# ---------------------------------------------------------------- the rule of advantage 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_of_advantage_zero_adds_nothing(name: str) -> None:
    """Anywhere, not only near ratio 1: no gradient at such rows, and none of it elsewhere."""
    method = algorithm(name)
    generator = torch.Generator().manual_seed(0)
    logprobs, old, source = (
        -3 * torch.rand(6, 5, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    whole = MicroBatch(
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
    plan = Plan((("mixed", 1),), (0.8,))
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
