"""Drafts that are begun before the survivors of another are gone through, as on a GPU: the same updates,
and no more memory than a graph."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ratio_rows import PEERS, assert_equal_state, learn, policy, rows

from hacrl.policy import reuse
from hacrl.policy.packing import lay
from hacrl.policy.policy import Policy
from hacrl.policy.update import Pass


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
        kept.append(inputs.tokens + drafts())
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
    inputs = SimpleNamespace(layout=lay([range(n) for n in (40, 30, 20, 1)]))
    begun = SimpleNamespace(inputs=inputs, beside=50)
    assert p._room(begun, [0, 1, 2, 3]) == ([0, 1, 3], [2])
    assert p._room(begun, [2, 3]) == ([2, 3], [])
    begun.beside = 0
    assert p._room(begun, [0, 1, 2, 3]) == ([0, 1, 2, 3], [])
    # Of 60 tokens a draft of 54 leaves 29: two rows of 20 that share 15 of them find room.
    p.agent = p.agent.model_copy(update={"microbatch_tokens": 60})
    shared = lay([[*range(15), n, *range(4)] for n in range(3)], [15] * 3)
    begun = SimpleNamespace(inputs=SimpleNamespace(layout=shared), beside=54)
    assert p._room(begun, [0, 1, 2]) == ([0, 1], [2])

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
