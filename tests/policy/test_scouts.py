"""As on a GPU: passes without a graph tell who survives, and the survivors go forward together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ratio_rows import PEERS, algorithm, assert_equal_state, learn, policy, rows

from hacrl.policy import gradients
from hacrl.policy.gradients import GradientPass
from hacrl.policy.policy import Policy
from hacrl.policy.update import Expected

DEAD, LIVE = (False, 0.5, -1.0), (False, 0.9, 1.2)


@pytest.fixture(autouse=True)
def scouting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientPass, "scouts", True)
    monkeypatch.setattr(gradients, "THIN_BELOW", {"cpu": 2.0})  # always


def order_of(p: Policy, samples, **settings) -> tuple[str, list[int]]:
    """Passes of an update, t thin and g with a graph, and the tokens of each."""
    order, tokens = [], []

    def note(_, __, result: torch.Tensor) -> None:
        order.append("g" if result.requires_grad else "t")
        tokens.append(result.shape[1])

    handle = p.model.model.norm.register_forward_hook(note)
    learn(p, samples, update=PEERS, **settings)
    handle.remove()
    return "".join(order), tokens


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_scouts_change_nothing(llama: Path, beta: float, changes: dict) -> None:
    scouting, plain = (
        policy(llama, beta, prune=x, microbatch_tokens=60, **changes) for x in (True, False)
    )
    samples = rows(plain)
    for _ in range(2):
        one, two = (learn(p, samples, update=PEERS, beta=beta) for p in (scouting, plain))
        assert_equal_state(scouting, plain)
        assert one.loss == pytest.approx(two.loss, abs=1e-6)
        assert one.pruned_backward > 0 == two.pruned_backward
        for mine, theirs in zip(one.ratios, two.ratios, strict=True):
            assert mine is None or mine == pytest.approx(theirs, abs=1e-6)
        plain.restore(scouting.checkpoint(1))


def test_survivors_go_together(llama: Path) -> None:
    """By hand: rows of 7 to 19 tokens, in micro-batches of at most 40, go forward without a graph; of
    each pair one survives, and those fill fewer micro-batches."""
    p = policy(llama, microbatch_tokens=40)
    samples = rows(p, [DEAD, LIVE] * 6)
    order, tokens = order_of(p, samples)
    thin, graph = order.count("t"), order.count("g")
    assert order == "t" * thin + "g" * graph and thin > graph > 1
    lengths = [len(s.token_ids) for s in samples]
    assert sum(tokens[:thin]) == sum(lengths)
    assert sum(tokens[thin:]) == sum(lengths[1::2])
    assert max(tokens) <= 40
    assert p.survived["peers"] == pytest.approx(sum(lengths[1::2]) / sum(lengths))


def test_each_is_asked_when_the_next_has_gone_forward(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = policy(llama, microbatch_tokens=40)
    begun, asked = [], []
    begin, ask = GradientPass._begin, GradientPass._survivors
    monkeypatch.setattr(GradientPass, "_begin", lambda *a: begun.append(1) or begin(*a))
    monkeypatch.setattr(GradientPass, "_survivors", lambda *a: asked.append(len(begun)) or ask(*a))
    learn(p, rows(p, [DEAD, LIVE] * 6), update=PEERS)
    assert len(begun) > 3 and asked == [*range(2, len(begun) + 1), len(begun)]


def test_where_nearly_all_survive_graphs_are_built_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen one micro-batch late; the next update knows it from the start."""
    monkeypatch.setattr(gradients, "THIN_BELOW", {"cpu": 0.9})
    p, plain = (policy(llama, prune=x, microbatch_tokens=40) for x in (True, False))
    samples = rows(p, [DEAD, *[LIVE] * 15])
    order, _ = order_of(p, samples)
    learn(plain, samples, update=PEERS)
    assert_equal_state(p, plain)
    assert order.startswith("ttg")
    samples = rows(p, [DEAD, *[LIVE] * 15])
    assert set(order_of(p, samples)[0]) == {"g"}


def test_a_graph_that_is_dropped_does_not_drop_the_scouts_before_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest rows, which come first, all survive; of the others hardly one: thin passes, then
    graphs, of which some are dropped."""
    monkeypatch.setattr(gradients, "THIN_BELOW", {"cpu": 0.9})
    p, plain = (policy(llama, prune=x, microbatch_tokens=40) for x in (True, False))
    samples = rows(p, [*[DEAD] * 8, *[LIVE] * 5])
    order, _ = order_of(p, samples)
    report = learn(plain, samples, update=PEERS)
    assert_equal_state(p, plain)
    assert order.startswith("ttg") and report.grad_norm > 1e-3
    assert p.survived["peers"] < 0.75


def test_who_scouts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, below 0.6, with whatever model and setting; not a CPU, and not without pruning."""
    monkeypatch.undo()
    p = policy(llama, gradient_checkpointing=True)
    one = GradientPass(p, rows(p), algorithm().loss, PEERS)
    one.expected = Expected("peers", before=0.59)
    assert not one.scouts and not one.reuses and not one._few_survive()
    one.device = torch.device("cuda")
    assert one.scouts and not one.reuses and one._few_survive()
    one.expected = Expected("peers", before=0.6)
    assert not one._few_survive()
    one.expected, one.agent = Expected("peers"), p.agent.model_copy(update={"prune": False})
    assert not one._few_survive()
    assert gradients.THIN_BELOW == {"cpu": 0.75, "cuda": 0.6}
