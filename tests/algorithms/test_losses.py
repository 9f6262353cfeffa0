"""gspo, grpo, xgrpo, naive and the KL term by hand, and the interface of an algorithm.

Two samples with rewards 1, 0: mean 1/2, std (ddof 1) = sqrt(1/2), so A = +-(1/2) / (sqrt(1/2) + 1e-6)
= +-0.70710578.
"""

from dataclasses import replace
from math import exp, isfinite, log, sqrt

import pytest
import torch
from by_hand import batch_of, gradient, rule, step_of

from hacrl.algorithms import ALGORITHMS, Needs
from hacrl.errors import UserError
from hacrl.types import Sample, Update

HALF = 0.5 / (sqrt(0.5) + 1e-6)
FIRST = Update(0, 0.8, "own", ())


def test_grpo_by_hand() -> None:
    """Two rows of 2 and 1 tokens, 3 tokens in all; A = +1 and -1.

    Row 1: old (-1, -1), new (-1 + ln 1.1, -1 + ln 1.5): ratios 1.1 and 1.5; 1.5 > 1.28 is clipped:
    J = 1.1 + 1.28. Row 2: ratio 0.5 < 0.8 with A = -1: min(-0.5, -0.8) = -0.8, no gradient.
    loss = -(1.1 + 1.28 - 0.8) / 3; d loss / d logprob = -1.1 / 3, 0, 0.
    """
    b = batch_of(
        [[-1 + log(1.1), -1 + log(1.5)], [-1 + log(0.5), 0.0]],
        mask=[[1.0, 1.0], [1.0, 0.0]],
        old=[[-1.0, -1.0], [-1.0, 0.0]],
        advantage=[1.0, -1.0],
    )
    output = rule("grpo").loss(b, FIRST)
    assert output.loss.item() == pytest.approx(-(1.1 + 1.28 - 0.8) / 3, abs=1e-12)
    assert gradient(output, b) == [pytest.approx([-1.1 / 3, 0.0], abs=1e-12), [0.0, 0.0]]
    assert output.weight_B.tolist() == pytest.approx([0.55, 0.0])


def test_gspo_by_hand() -> None:
    """One row of two tokens: mean log-probability moves from -1 to -1 + 0.0002, s = exp(0.0002),
    inside 1 + 4e-4: J = s A. The other, A = -2, moves by -0.001: s = exp(-0.001) < 1 - 3e-4, the clip
    wins: J = -2 * (1 - 3e-4). loss = -(J1 + J2) / 2; gradient of row 1 on each of its two tokens:
    -s A / 2 / 2."""
    b = batch_of([[-0.9996, -1.0], [-1.001, -1.001]], advantage=[1.5, -2.0])
    output = rule("gspo").loss(b, FIRST)
    s = exp(0.0002)
    assert output.loss.item() == pytest.approx(-(1.5 * s - 2 * (1 - 3e-4)) / 2, abs=1e-12)
    assert gradient(output, b) == [pytest.approx([-s * 1.5 / 4] * 2, abs=1e-12), [0.0, 0.0]]
    assert output.weight_B.tolist() == pytest.approx([s, 0.0])


def test_gspo_credits_own_group_only() -> None:
    """Own rewards 1, 0 give A = +-0.7071; the peer's failure does not count."""
    credited = rule("gspo").credit(step_of({"q": {"a": "10", "b": "0"}}))
    assert [s.advantage for s in credited[:2]] == pytest.approx([HALF, -HALF], abs=1e-12)


def test_naive_pools_plainly_and_clips_peers_like_own() -> None:
    """Rewards a: 1, 0; b: 0, 0. Mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
    A(1) = 0.75 / 0.500001, A(0) = -0.25 / 0.500001, for every source and without weights."""
    naive = rule("naive")
    credited = naive.credit(step_of({"q": {"a": "10", "b": "00"}}, a=0.5, b=0.1))
    up, down = 0.75 / 0.500001, -0.25 / 0.500001
    assert [s.advantage for s in credited] == pytest.approx([up, down, down, down])
    assert [s.weight for s in credited] == [1.0] * 4
    b = batch_of([[-1.0], [-1.2]], [True, False], advantage=[1.0, -1.0])
    output = naive.loss(b, FIRST)  # the peer's s = exp(-0.2) < 1 - 3e-4: clipped at 0.9997
    assert output.loss.item() == pytest.approx(-(1.0 - 0.9997) / 2, abs=1e-12)
    assert gradient(output, b)[1] == [0.0]


def test_the_baseline_of_xgrpo_is_of_all_agents() -> None:
    """q: a 1, 0; b 1, 1. Mean 3/4, squares 3/16 + 9/16 over 4 - 1: the deviation is 1/2.
    r: a is always right, and b's failure gives it a signal: mean 3/4 again.
    s: all rewards are equal. u: b's reply was not judged and does not count."""
    replies = {
        "q": {"a": "10", "b": "11"},
        "r": {"a": "11", "b": "10"},
        "s": {"a": "00", "b": "00"},
        "u": {"a": "10", "b": "t"},
    }
    wanted = [0.5, -1.5, 0.5, 0.5, 0, 0, HALF, -HALF]
    credited = [s for s in rule("xgrpo").credit(step_of(replies)) if s.is_own]
    assert [s.advantage for s in credited] == pytest.approx(wanted, abs=1e-5)
    assert {s.weight for s in credited} == {1.0}


def test_kl_by_hand_counts_own_samples_only() -> None:
    """k3 = r - ln r - 1 with r = pi_start / pi. Row 1 (own): r = 2 and 1 -> (1 - ln 2) and 0, mean
    (1 - ln 2) / 2. Row 2 is a peer's and does not count. One own sample, so KL = (1 - ln 2) / 2;
    with beta = 0.1 and A = 0 the loss is 0.1 of it, and its gradient on the first token is
    0.1 * (1 - r) / 2 = -0.05."""
    b = batch_of(
        [[-1.0, -1.0], [-1.0, -1.0]], [True, False], ref=[[-1.0 + log(2), -1.0], [-3.0, -3.0]]
    )
    output = rule("hacpo", beta=0.1).loss(b, FIRST)
    assert output.kl == pytest.approx((1 - log(2)) / 2, abs=1e-12)
    assert output.loss.item() == pytest.approx(0.1 * (1 - log(2)) / 2, abs=1e-12)
    assert gradient(output, b) == [pytest.approx([-0.05, 0.0], abs=1e-12), [0.0, 0.0]]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loss_of_a_minibatch_is_the_sum_over_its_microbatches(name: str) -> None:
    """The KL term included: a loss divides by counts of the minibatch, not of its own rows."""
    whole = batch_of(
        [[-1.0, -0.7], [-2.0, -0.3], [-0.5, 0.0]],
        [True, True, False],
        mask=[[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]],
        behaviour=[-0.85, -1.15, -0.5],
        old=[[-1.1, -0.6], [-2.1, -0.2], [-0.6, 0.0]],
        source=[[-1.1, -0.6], [-2.1, -0.2], [-0.4, 0.0]],
        ref=[[-1.2, -0.7], [-1.7, -0.4], [-0.9, 0.0]],
        advantage=[1.0, -1.0, 0.5],
        weight=[1.0, 1.0, 0.7],
    )
    method, update, parts = rule(name, beta=0.3), Update(0, 0.8, "mixed", ("q", "r")), 0.0
    for i in range(3):
        tensors = {k: v[i : i + 1] for k, v in vars(whole).items() if torch.is_tensor(v)}
        parts += method.loss(replace(whole, **tensors), update).loss.item()
    assert parts == pytest.approx(method.loss(whole, update).loss.item(), abs=1e-12)


# ---------------------------------------------------------------- the interface


@pytest.mark.parametrize("name", ["hacpo", "gspo", "naive"])
def test_fewer_than_two_judged_give_no_signal(name: str) -> None:
    (credited,) = rule(name).credit(step_of({"q": {"a": "1t"}}))
    assert credited.advantage == 0.0


def test_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="hacpo, gspo, grpo, naive, sgt, graft, f-tis"):
        rule("hapco")


ELSEWHERE = """
from hacrl.algorithms import Algorithm, Needs
from hacrl.algorithms.base import PeerSettings
from hacrl.algorithms.gspo import Gspo, GspoSettings
class Mixed(Gspo):
    class Settings(PeerSettings, GspoSettings):
        cap: float = 2.0
    needs = Needs("logprob", updates="mixed")
class Half(Algorithm):
    def credit(self, step): return []
class Foreign:
    pass
def function(settings, reward_range): pass
"""


def test_an_algorithm_by_import_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    assert rule("elsewhere:Mixed").needs.updates == "mixed"
    changed = rule("elsewhere:Mixed", order="peers_first", cap=3.0)
    assert (changed.needs.updates, changed.settings.cap) == ("peers_first", 3.0)
    for name, words in (
        ("Half", "define loss in the class"),
        ("Foreign", "derive it from hacrl.algorithms.Algorithm"),
        ("function", "is not an algorithm"),
        ("Missing", "has no 'Missing'"),
    ):
        with pytest.raises(UserError, match=words):
            rule(f"elsewhere:{name}")


@pytest.mark.parametrize(
    "name", ["gspo", "grpo", "naive", "hacpo", "sgt", "graft", "f-tis", "overlap"]
)
@pytest.mark.parametrize("advantage", [[1.5, -2.0], [-2.0, 1.5]])
def test_an_absurd_log_probability_voids_no_update(name: str, advantage: list[float]) -> None:
    """FAULTS D6: a row that claims -1000 a token. exp(1000) is inf, and inf * 0 is nan; now the row
    has no gradient through its ratio, and the other row learns as if it were not there."""
    far, near = [-1000.0, -1000.0], [-1.0, -1.0]
    batch = batch_of(
        [near, near],
        own=[True, name in ("gspo", "grpo")],
        behaviour=[-1.0, -1000.0],
        advantage=advantage,
        old=[near, far],
        source=[near, far],
        ref=[near, near],
    )
    output = rule(name, beta=0.1).loss(batch, FIRST)
    values = [output.loss.item(), *output.ratio_B.tolist(), *output.weight_B.tolist()]
    values += [x for row in gradient(output, batch) for x in row]
    assert all(map(isfinite, values))
    kl = batch_of([far, near], advantage=[0.0, 0.0], ref=[near, near])
    assert isfinite(rule("gspo", beta=0.1).loss(kl, FIRST).kl.item())


def test_graft_weighs_an_absurd_log_probability() -> None:
    sample = Sample("q", 0, "b", False, (1, 2), (0, 1), behaviour=-1000.0, old_logprobs=(-1.0,))
    assert rule("graft").weight(sample) == 1.0  # exp(999) was an OverflowError


def test_needs_are_levels() -> None:
    levels = ("none", "outcomes", "text", "logprob", "tokens")
    assert [Needs(peers).include("text") for peers in levels] == [False, False, True, True, True]
