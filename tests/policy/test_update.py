"""In half precision own ratios ignore rounding, and are 1 at the weights that scored."""

import pickle
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import ratio_rows
import torch
from by_hand import batch_of
from rounding import RoundsByShape

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.policy.policy import Policy
from hacrl.policy.update import WithoutRounding
from hacrl.types import Sample, Update

LOW, HIGH = 3e-4, 4e-4


def policy(model: Path, beta: float = 0.0, **changes) -> Policy:
    settings = {"microbatch_tokens": 100, "learning_rate": 1e-6, **changes}
    return ratio_rows.policy(model, beta, **settings)


def loss_of(name: str, beta: float = 0.0):
    return make_algorithm(make_settings(name, beta=beta)).loss


def scored(p: Policy) -> list[Sample]:
    """Replies of 2 to 40 tokens to eight problems, in at least four micro-batches. Own ones have the
    scores of `p`; every third is a peer's, without scores, with a behaviour 0.1 above the learner's."""
    drawn = torch.Generator().manual_seed(5)
    sizes = [(3 + i % 2, 2 + 5 * i % 39) for i in range(24)]
    pairs = [
        tuple(torch.randint(0, 256, (n,), generator=drawn).tolist() for n in both) for both in sizes
    ]
    return [
        Sample(
            f"p{i // 3}",
            i,
            "a" if i % 3 else "b",
            i % 3 > 0,
            (*prompt, *reply),
            (0,) * len(prompt) + (1,) * len(reply),
            sum(score) / len(score) + (0.0 if i % 3 else 0.1),
            old_logprobs=tuple(score) if i % 3 else None,
            advantage=0.0 if i // 3 in (2, 5) else (-1.0) ** i,
        )
        for i, ((prompt, reply), score) in enumerate(zip(pairs, p.score(pairs), strict=True))
    ]


def outside(ratios: list[float]) -> int:
    return sum(not 1 - LOW <= s <= 1 + HIGH for s in ratios)


@pytest.mark.parametrize("part", ["own", "mixed"])
@pytest.mark.parametrize(("beta", "changes"), [(0.0, {}), (0.1, {}), (0.0, {"lora": {"rank": 4}})])
def test_own_ratios_are_1_at_the_weights_of_scoring(
    llama: Path, part: str, beta: float, changes: dict
) -> None:
    """The minibatch is half of what was scored, and two groups have advantage 0. Peers' rows were not
    scored, so the forward gives their ratios."""
    name = "gspo" if part == "own" else "hacpo"
    update = Update(0, 0.8, part, ())
    found = []
    for wrap in (lambda loss: loss, WithoutRounding):
        p = policy(llama, beta, dtype="bfloat16", **changes)
        with RoundsByShape():
            batch = [s for s in scored(p)[6:18] if s.is_own or part == "mixed"]
            loss = wrap(loss_of(name, beta))
            report = p.update(batch, loss, update)
        assert not report.skipped and report.grad_norm > 0
        found.append([s for s in zip(batch, report.ratios, strict=True) if s[1] is not None])
    own, peers = (
        [[ratio for s, ratio in rows if s.is_own is mine] for rows in found]
        for mine in (True, False)
    )
    assert report.kl == pytest.approx(0.0, abs=1e-9)  # of the forward, at the start weights
    assert outside(own[0]) > 0  # by rounding
    assert own[1] == pytest.approx([1.0] * len(own[0]), abs=1e-6)
    assert peers[1] == peers[0] and len(peers[0]) == (0 if part == "own" else len(own[0]) / 2)


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_the_gradient_is_that_of_the_forward(llama: Path, name: str) -> None:
    """In float32 nothing changes, for a sequence's ratio and for token ratios. The loss can be pickled,
    as sharding needs."""
    p = policy(llama)
    batch = [s for s in scored(p) if s.is_own]
    loss, update = loss_of(name), Update(0, 0.8, "own", ())
    plain, wrapped = (
        p.gradient(batch, range(len(batch)), f, update)
        for f in (loss, pickle.loads(pickle.dumps(WithoutRounding(loss))))
    )
    assert max(g.abs().max() for g in plain.values()) > 1e-3
    for tensor, gradient in plain.items():
        assert torch.allclose(wrapped[tensor], gradient, atol=1e-6, rtol=0), tensor


def test_scores_are_kept_for_their_step_until_the_weights_change(llama: Path) -> None:
    """A skipped update keeps them; a real one and a restored checkpoint do not. In float32 the loss is
    never wrapped."""
    p, loss, update = policy(llama, dtype="bfloat16"), loss_of("gspo"), Update(0, 0.8, "own", ())
    batch = [s for s in scored(p) if s.is_own]
    start = p.checkpoint(0)
    at_scores, later = WithoutRounding(loss), WithoutRounding(loss, 0.1)
    p.mark_scored(3, 0.1)
    assert p.without_rounding(loss, 3) == at_scores and p.without_rounding(loss, 4) == later
    broken = [replace(s, advantage=float("nan")) for s in batch]
    assert p.update(broken, p.without_rounding(loss, 3), update).skipped
    assert p.without_rounding(loss, 3) == at_scores
    assert not p.update(batch, p.without_rounding(loss, 3), update).skipped
    assert p.without_rounding(loss, 3) == later
    p.mark_scored(3, 0.1)
    p.restore(start)
    assert p.without_rounding(loss, 3) == later
    exact = policy(llama)
    exact.mark_scored(3, 0.1)
    assert exact.without_rounding(loss, 3) is loss


def test_changes_within_rounding_count_as_none() -> None:
    """Mean changes 0.4, -0.2 and 0 of rows with 4 tokens; the last row was not scored. The sum of their
    squares is 0.2. Rounding of 0.1 a token has a variance of 0.0025 in a mean, 0.0075 in three rows; the
    bound is 1.5 (1 + 3 sqrt(2 / 3)) = 5.174 times that, 0.0388. So 1 - 0.0388 / 0.2 = 0.806 is kept."""
    found = [[0.4] * 4, [-0.4, 0.0, -0.4, 0.0], [0.0] * 4, [0.7] * 4]
    batch = batch_of(found, old=[*[[0.0] * 4] * 3, [float("nan")] * 4])
    found_BT = batch.logprobs_BT
    seen: list[torch.Tensor] = []
    for noise in (0.1, 9.0, inf):  # more rounding than change: nothing is kept
        found_BT.grad = None
        loss = WithoutRounding(
            lambda b, _: seen.append(b.logprobs_BT) or b.logprobs_BT.sum(), noise
        )
        loss(batch, Update(0, 0.8, "own", ())).backward()
        assert found_BT.grad.tolist() == [[1.0] * 4] * 4
    assert seen[0].mean(1).tolist() == pytest.approx([0.3224, -0.1612, 0.0, 0.7], abs=1e-4)
    assert seen[0][1].tolist() == pytest.approx([-0.3224, 0.0, -0.3224, 0.0], abs=1e-4)
    for other in seen[1:]:
        assert other.mean(1).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.7], abs=1e-7)


def test_an_update_after_the_first_ignores_rounding(llama: Path) -> None:
    """The weights move by 1e-9, far less than the clip range; rounding alone would clip samples."""
    p = policy(llama, dtype="bfloat16", learning_rate=1e-9)
    loss, update, found = loss_of("gspo"), Update(0, 0.8, "own", ()), []
    with RoundsByShape():
        batch = [s for s in scored(p)[6:18] if s.is_own]
        p.update(batch, loss, update)
        for noise in (0.0, 0.1):
            report = p.update(batch, WithoutRounding(loss, noise), update)
            found.append(outside([r for r in report.ratios if r is not None]))
    assert found[0] > 0 and found[1] == 0


@pytest.mark.parametrize("rows", [1, 16, 512])
def test_rounding_of_the_expected_size_is_never_clipped(rows: int) -> None:
    """Rounding of 0.01 in the mean of a row is 30 times the clip range. With rows that changed by
    rounding alone at most 2 % are outside the clip; changes 5 times as large keep their decisions."""
    drawn = torch.Generator().manual_seed(0)
    clipped, moved = [], []
    for _ in range(2048 // rows):
        noise = 0.1 * torch.randn(rows, 100, generator=drawn)  # 0.01 in the mean of 100 tokens
        for size, found in ((0.0, clipped), (0.05, moved)):
            change = noise + size * torch.randn(rows, 1, generator=drawn).sign()
            batch = batch_of(change.tolist(), old=[[0.0] * 100] * rows)
            seen: list[torch.Tensor] = []
            WithoutRounding(lambda b, _, seen=seen: seen.append(b.mean_logprob_B), 0.1)(
                batch, Update(0, 0.8, "own", ())
            )
            found += seen[0].exp().tolist()
    assert outside(clipped) <= 0.02 * len(clipped)
    assert outside(moved) >= 0.95 * len(moved)
