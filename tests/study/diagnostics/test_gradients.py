"""Gradients by source, and displacements compared with AdamW's updates."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hacrl.algorithms import Algorithm, Needs, make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.study.diagnostics.gradients import (
    Directions,
    blocks,
    cosine,
    directions,
    displace,
    dot,
    norm,
)
from hacrl.training.plan import Plan, make_plan
from hacrl.types import Message, Sample

PROBLEMS = ("p", "q", "r", "s")


def policy(model: Path, **changes: object) -> Policy:
    settings = {"name": "a", "model": str(model), "learning_rate": 1e-3, "weight_decay": 0.0}
    return Policy(
        AgentConfig.model_validate(settings | changes), device="cpu", temperature=1.0, beta=0.0
    )


def plan(order: str = "own_first", **samples: int) -> Plan:
    return make_plan(
        learner="a",
        prompts=4,
        samples_per_prompt=samples,
        minibatch_samples=4,
        needs=Needs("logprob", updates=order),
        floor=0.8,
        last_floor=0.875,
    )


def samples(p: Policy, source: str = "a", sign: float = 1.0, count: int = 4) -> list[Sample]:
    """Replies of the policy itself with alternating advantages, under the name `source`."""
    made = []
    for i, problem in enumerate(PROBLEMS[:count]):
        prompt = p.renderer.prompt([Message("user", problem * (i + 1))])
        key = stream_key(0, "a", 0, problem, 0)
        [reply] = p.sampler.sample([Request(prompt, key, 8 + i)], 1.0)
        [scores] = p.score([(prompt, reply.token_ids)])
        made.append(
            Sample(
                problem_id=problem,
                index=0,
                source=source,
                is_own=source == "a",
                token_ids=prompt + reply.token_ids,
                loss_mask=(0,) * len(prompt) + (1,) * len(reply.token_ids),
                behaviour=sum(scores) / len(scores),
                old_logprobs=tuple(scores),
                advantage=sign * (-1.0) ** (i // 2) * (1 + i),
            )
        )
    return made


def algorithm(name: str) -> Algorithm:
    return make_algorithm(make_settings(name))


def found(p: Policy, chosen: list[Sample], how: Plan, name: str = "naive") -> Directions:
    return directions(p, algorithm(name), blocks(how, chosen, PROBLEMS), "a")


def test_products_by_hand() -> None:
    """(3,4) . (4,3) = 24, both of norm 5; across two tensors they add up."""
    a, b = {"x": torch.tensor([3.0, 4.0])}, {"x": torch.tensor([4.0, 3.0])}
    assert (dot(a, b), norm(a), cosine(a, b)) == (24.0, 5.0, pytest.approx(0.96))
    two = {"x": torch.tensor([[3.0]]), "y": torch.tensor([4.0])}
    assert (norm(two), cosine(two, {k: -v for k, v in two.items()})) == (5.0, pytest.approx(-1))
    assert cosine(a, {"x": torch.zeros(2)}) is None


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 1.0), (-1.0, -1.0)])
def test_cosine_of_a_peer_with_equal_or_opposite_rewards(
    sign: float, expected: float, llama: Path
) -> None:
    """The same replies at s = 1 under another name, with equal or opposite rewards."""
    p = policy(llama)
    made = found(p, samples(p) + samples(p, "b", sign), plan(a=1, b=1)).metrics
    assert made["diagnostics/cosine/b"] == pytest.approx(expected, abs=1e-4)
    norms = [made[f"diagnostics/gradient_norm/{s}"] for s in "ab"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and norms[0] > 0
    assert abs(made["diagnostics/cosine/a"]) < 0.99  # its halves have different problems
    one = samples(p, count=1)[0]
    made = found(p, [replace(one, problem_id=q) for q in PROBLEMS], plan(a=1), "gspo").metrics
    assert made["diagnostics/cosine/a"] == pytest.approx(1, abs=1e-5)


def test_the_parts_of_a_block_add_up_to_its_gradient(llama: Path) -> None:
    p = policy(llama)
    chosen = samples(p) + samples(p, "b", -0.5) + samples(p, "c", 2.0)
    [block] = blocks(plan("mixed", a=1, b=1, c=1), chosen, PROBLEMS)
    loss = algorithm("naive").loss
    whole = p.gradient(block.samples, range(12), loss, block.update)
    rows = {s: [i for i in range(12) if block.samples[i].source == s] for s in "abc"}
    parts = [p.gradient(block.samples, rows[s], loss, block.update) for s in "abc"]
    assert norm(whole) > 0
    for name, tensor in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), tensor, rtol=1e-4, atol=1e-6)


def weights(p: Policy) -> dict[str, torch.Tensor]:
    return {n: m.detach().clone() for n, m in p.master.items()}


@pytest.mark.parametrize("limit", [1e9, 0.01])
@pytest.mark.parametrize("before", [0, 3])
def test_displacement_equals_an_update(before: int, limit: float, llama: Path) -> None:
    """Without a first moment (b1 = 0) the displacement of an update is the update itself: the first one,
    one after three others, and one with a clipped gradient. AdamW's eps decides for entries with a
    gradient near zero, so the comparison is loose."""
    p = policy(llama, betas=(0.0, 0.99), max_grad_norm=limit)
    loss = algorithm("grpo").loss
    chosen = samples(p)
    [block] = blocks(plan(a=1), chosen, PROBLEMS)
    for i in range(before):
        p.update(chosen[i:], loss, block.update)
    gradient = p.gradient(chosen, range(4), loss, block.update)
    displace(p, [(1, [gradient])])
    start = weights(p)
    p.update(chosen, loss, block.update)
    moved = {n: m - start[n] for n, m in weights(p).items()}
    assert cosine(moved, gradient) == pytest.approx(1, abs=1e-4)
    assert norm(gradient) == pytest.approx(norm(moved), rel=1e-3)


def test_a_check_of_gradients_changes_nothing(llama: Path) -> None:
    """Weights, optimizer and the next update are the same with and without it."""
    loss = algorithm("naive").loss
    ends, reports = [], []
    for checked in (False, True):
        p = policy(llama)
        chosen = samples(p) + samples(p, "b", -1.0)
        [own, peers] = blocks(plan(a=1, b=1), chosen, PROBLEMS)
        p.update(own.samples, loss, own.update)
        if checked:
            before = p.checkpoint(0)
            found(p, chosen, plan(a=1, b=1))
            after = p.checkpoint(0)
            assert after.state == before.state
            for kind in ("model", "optimizer"):
                for name, tensor in getattr(before, kind).items():
                    assert torch.equal(tensor, getattr(after, kind)[name])
        reports.append(p.update(peers.samples, loss, peers.update))
        ends.append(weights(p))
    assert reports[0] == reports[1]
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
