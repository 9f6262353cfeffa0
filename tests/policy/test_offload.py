"""What waits on the host comes back as it was, and the resident weights stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hacrl.algorithms import make_algorithm
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.config import AgentConfig
from hacrl.policy.policy import Policy
from hacrl.types import Sample, Update

UPDATE = Update(0, 1, 0.8, "own", ("p",))
LOSS = make_algorithm(AlgorithmSettings(name="gspo", beta=0.1), (0.0, 1.0)).loss


def policy(model: Path, **changes) -> Policy:
    settings = {"name": "a", "model": str(model), "learning_rate": 1e-3, **changes}
    return Policy(AgentConfig(**settings), device="cpu", temperature=1.0, beta=0.1)


def samples(p: Policy) -> list[Sample]:
    made = []
    for i in range(4):
        prompt, reply = (1, 2 + i), tuple(range(9, 15 + 2 * i))
        (score,) = p.score([(prompt, reply)])
        made.append(
            Sample(
                problem_id="p",
                index=i,
                source="a",
                is_own=True,
                token_ids=prompt + reply,
                loss_mask=(0, 0) + (1,) * len(reply),
                behaviour=sum(score) / len(score),
                advantage=1.5 - i,
            )
        )
    return made


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"dtype": "float32"}])
def test_parked_between_updates_it_learns_the_same(llama: Path, changes: dict) -> None:
    """bfloat16 has a master of its own to park; in float32 the resident weights are the master."""
    parked, plain = (policy(llama, offload=o, **changes) for o in ("optimizer", "none"))
    where = {n: t.data_ptr() for n, t in parked.model.named_parameters()}
    apart = changes["dtype"] == "bfloat16"
    for _ in range(3):
        reports = [p.update(samples(p), LOSS, UPDATE) for p in (parked, plain)]
        assert reports[0] == reports[1]
        working = {n: t.data_ptr() for n, t in parked.master.items()}
        moments = [parked.optimizer.state[t]["exp_avg"] for t in parked.master.values()]
        for p in (parked, plain):
            p.rest()
        moved = [t.data_ptr() != working[n] for n, t in parked.master.items()]
        assert all(moved) if apart else not any(moved)
        for tensor, before in zip(parked.master.values(), moments, strict=True):
            now = parked.optimizer.state[tensor]["exp_avg"]
            assert now.data_ptr() != before.data_ptr() and torch.equal(now, before)
        assert all(t.grad is None for t in parked.master.values())
        assert {n: t.data_ptr() for n, t in parked.model.named_parameters()} == where
    assert reports[0].kl > 0
    a, b = (p.snapshot(3) for p in (parked, plain))  # while parked
    for one, two in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_parked_policy_can_be_restored(llama: Path) -> None:
    first = policy(llama, dtype="bfloat16")
    rows = samples(first)
    first.update(rows, LOSS, UPDATE)
    other = policy(llama, dtype="bfloat16", offload="optimizer")
    other.update(rows, LOSS, UPDATE)
    other.update(rows, LOSS, UPDATE)
    other.rest()
    other.restore(first.snapshot(1))
    for p in (first, other):
        p.update(rows, LOSS, UPDATE)
    assert all(torch.equal(first.master[n], other.master[n]) for n in first.master)


def test_gradients_of_bfloat16_are_summed_in_float32(llama: Path) -> None:
    """Four micro-batches of one row each: the sum has more digits than bfloat16, and no resident
    tensor is left with a gradient."""
    p = policy(llama, dtype="bfloat16", microbatch_tokens=1, max_grad_norm=1e9)
    p.update(samples(p), LOSS, UPDATE)
    found = [t.grad for t in p.master.values()]
    assert all(g.dtype == torch.float32 for g in found)
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found)
    assert all(t.grad is None for t in p.model.parameters())
