"""Skipping samples of advantage 0 changes the time of an update, not its result."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from by_hand import batch_of
from ratio_rows import SPECS, UPDATE, algorithm, assert_equal_state, learn, policy, rows_of
from team import NO_EVALUATION, member, team

import hacrl
from hacrl.algorithms import ALGORITHMS
from hacrl.policy.batch import divisors_of, make_batch, make_inputs
from hacrl.policy.policy import Policy
from hacrl.types import Sample

PEERS = replace(UPDATE, part="peers")
ZERO_ADVANTAGE = [i for i, (_, _, advantage) in enumerate(SPECS) if advantage == 0]


def whole_gradient(p: Policy, samples: list[Sample], loss) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of all samples in one plain forward and backward, nothing skipped."""
    ids, masks = [s.token_ids for s in samples], [s.loss_mask for s in samples]
    inputs = make_inputs(ids, masks, p.renderer.pad_id, p.device)
    start_BT = p.start_logprobs(inputs).detach() if p.start_logprobs else None
    batch = make_batch(samples, inputs, p.logprobs(inputs), start_BT, divisors_of(samples))
    total = loss(batch, UPDATE).loss
    found = torch.autograd.grad(total, list(p.master.values()), materialize_grads=True)
    return total.item(), dict(zip(p.master, found, strict=True))


@pytest.mark.parametrize(
    ("name", "beta", "changes"),
    [(n, b, {"microbatch_tokens": t}) for n in ALGORITHMS for b, t in ((0.0, 40), (0.1, 16384))]
    + [("hacpo", 0.1, {"microbatch_tokens": 40}), ("hacpo", 0.0, {"microbatch_tokens": 16384})]
    + [("hacpo", 0.0, {"microbatch_tokens": 40, "gradient_checkpointing": True})]
    + [("hacpo", 0.0, {"microbatch_tokens": 40, "lora": {"rank": 4}})],
)
def test_loss_and_gradient_are_those_of_all_samples(
    llama: Path, name: str, beta: float, changes: dict
) -> None:
    """In one micro-batch and in several, at the start weights and after an update."""
    p = policy(llama, beta, max_grad_norm=1e9, **changes)
    loss = algorithm(name, beta=beta).loss
    for _ in range(2):
        samples = rows_of(p)
        total, wanted = whole_gradient(p, samples, loss)
        found = p.gradient(samples, range(len(samples)), loss, UPDATE)
        for key, gradient in wanted.items():
            assert torch.allclose(found[key], gradient, atol=1e-6, rtol=0), key
        report = p.update(samples, loss, UPDATE)
        assert report.loss == pytest.approx(total, abs=1e-6)
        assert report.grad_norm > 1e-3
        skipped = [i for i, ratio in enumerate(report.ratios) if ratio is None]
        assert skipped == ([] if beta else ZERO_ADVANTAGE)
        assert [i for i, used in enumerate(report.weights) if used is None] == skipped


def test_an_update_of_peers_has_no_kl_term(llama: Path) -> None:
    """The KL term is of own samples. An update of peers only equals the one without the term, also in
    the skipped samples, and the start weights are not used."""
    with_term, without = policy(llama, beta=0.1), policy(llama)
    learn(with_term, rows_of(with_term), beta=0.1)  # away from the start weights
    without.restore(with_term.checkpoint(1))
    samples = [s for s in rows_of(without) if not s.is_own]
    calls = []
    with_term.start_model.model.register_forward_hook(lambda *a: calls.append(a))
    one = learn(with_term, samples, update=PEERS, beta=0.1)
    two = learn(without, samples, update=PEERS)
    assert_equal_state(with_term, without)
    assert one.kl == 0.0 and one.ratios.count(None) == two.ratios.count(None) == 1
    assert not calls
    learn(with_term, rows_of(with_term), beta=0.1)
    assert calls


@pytest.mark.parametrize("spec", [(True, 1.5, 1.0), (True, 1.0, 0.0)])
def test_without_any_gradient_the_optimizer_steps(llama: Path, spec) -> None:
    """Clipped samples or samples of advantage 0. From fresh moments only weight decay moves the weights:
    w * (1 - lr * decay). After an update with a gradient the moments shrink by 0.9 and 0.999."""
    p = policy(llama, weight_decay=0.5)
    before = {n: m.detach().clone() for n, m in p.master.items()}
    report = learn(p, rows_of(p, [spec] * 4))
    assert not report.skipped and report.grad_norm == 0 and p.updates_made == 1
    for name, parameter in p.master.items():
        assert torch.allclose(parameter, before[name] * (1 - 1e-3 * 0.5), atol=1e-7)
    learn(p, rows_of(p))
    moments = {n: p.optimizer.state[m]["exp_avg"].clone() for n, m in p.master.items()}
    learn(p, rows_of(p, [spec] * 4))
    for name, parameter in p.master.items():
        state = p.optimizer.state[parameter]
        assert state["step"] == 3
        assert torch.allclose(state["exp_avg"], 0.9 * moments[name], atol=1e-8)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_of_advantage_zero_adds_nothing(name: str) -> None:
    """Anywhere, not only near ratio 1: no gradient at such rows, and none of it elsewhere."""
    method = algorithm(name)
    generator = torch.Generator().manual_seed(0)
    logprobs, old, source = (
        (-3 * torch.rand(6, 5, generator=generator, dtype=torch.float64)).tolist() for _ in range(3)
    )
    whole = batch_of(
        logprobs,
        [True, True, False, False, True, False],
        behaviour=[sum(row) / 5 for row in source],
        old=old,
        source=source,
        advantage=[0.0, 1.0, 0.0, -1.0, 0.0, 1.0],
        weight=[1.3] * 6,
    )
    kept = whole.advantage_B != 0
    tensors = {key: value for key, value in vars(whole).items() if torch.is_tensor(value)}
    part = replace(whole, **{key: value[kept].detach() for key, value in tensors.items()})
    part.logprobs_BT.requires_grad_()
    losses = [method.loss(batch, UPDATE).loss for batch in (whole, part)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    gradient, rest = (
        torch.autograd.grad(loss, batch.logprobs_BT)[0]
        for loss, batch in zip(losses, (whole, part), strict=True)
    )
    assert not gradient[~kept].any()
    assert torch.allclose(gradient[kept], rest, atol=1e-12)


def test_skipped_samples_are_null_in_the_samples_file(tmp_path: Path) -> None:
    settings = {"steps": 1, "samples_per_prompt": 2, **NO_EVALUATION}
    run = hacrl.train(team(member("wren"), member("finch"), **settings), tmp_path / "run")
    metrics = run.metric_rows("train")
    for row in metrics:
        stored = run.sample_rows(row["step"], row["agent"])
        skipped = [s["advantage"] == 0 for s in stored]
        assert [s["ratio"] is None for s in stored] == skipped
        assert [s["used"] is None for s in stored] == skipped
        assert row["pruned/forward"] == sum(skipped)
    assert sum(row["pruned/forward"] for row in metrics) > 0
