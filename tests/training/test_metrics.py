from dataclasses import replace

import pytest

from hacrl.algorithms.capability import Capability
from hacrl.policy.update import UpdateReport
from hacrl.training.metrics import (
    effective_samples,
    learning_metrics,
    rollout_metrics,
)
from hacrl.training.plan import Plan
from hacrl.training.scoring import agreement
from hacrl.types import Completion, Finish, Rollout, Sample, Status, Update, Verdict


def rollout(reward: float, status: Status, tokens: int, finish: Finish = Finish.STOP) -> Rollout:
    completion = Completion("x", (1,) * tokens, (-0.5,) * tokens, finish)
    return Rollout("q", 0, 0, (9,), completion, Verdict(reward, status))


def test_rollout_metrics_by_hand() -> None:
    """Judged rewards 1, 0, 0 (the time-out does not count): mean 1/3. Lengths 2, 4, 2, 4: mean 3; one
    of four reached the limit."""
    made = rollout_metrics(
        [
            rollout(1.0, Status.OK, 2),
            rollout(0.0, Status.WRONG, 4),
            rollout(0.0, Status.UNPARSED, 2),
            rollout(0.0, Status.TIMEOUT, 4, Finish.LENGTH),
        ],
        too_long=2,
    )
    assert made["reward"] == pytest.approx(1 / 3)
    assert (made["reply_tokens"], made["truncated"], made["not_attempted"]) == (3, 0.25, 2)
    counts = [made[f"verdict/{s}"] for s in ("ok", "wrong", "unparsed", "timeout", "error")]
    assert counts == [1, 1, 1, 1, 0]


def test_effective_samples_by_hand() -> None:
    """Equal weights count fully; (2 + 1 + 1)^2 / (4 + 1 + 1) = 16 / 6."""
    assert effective_samples([0.5] * 7) == pytest.approx(7)
    assert effective_samples([2.0, 1.0, 1.0]) == pytest.approx(16 / 6)
    assert effective_samples([0.0, 0.0]) == 0.0


def test_agreement_is_by_sequence_means() -> None:
    """Means -0.5 against -0.6 and -0.5 against -0.5: gaps 0.1 and 0, mean 0.05. Squares times lengths,
    0.01 * 2 and 0: a token's rounding is sqrt(0.01) = 0.1."""
    a, b = rollout(1.0, Status.OK, 2), rollout(1.0, Status.OK, 3)
    moved = Rollout("q", 0, 0, (9,), Completion("x", (1, 1), (-0.4, -0.8), Finish.STOP))
    facts, rounding = agreement([a, b], [moved, b])
    assert facts == pytest.approx({"agreement/max_gap": 0.1, "agreement/mean_gap": 0.05})
    assert rounding == pytest.approx(0.1)


def test_learning_metrics_by_hand() -> None:
    """Of two own updates the first clips nothing, the second its sample. Four peers' samples at floor
    0.8 with s = 0.7, 0.9, 1.1, 0.8: one below, one above, two used."""

    def sample(source: str, tokens: int) -> Sample:
        ids, mask = (1,) * (tokens + 1), (0,) + (1,) * tokens
        blank = Sample("q", 0, source, source == "a", ids, mask, -1.0)
        return replace(blank, advantage=0.5, weight=2.0)

    own, peers = [sample("a", 2)], [sample("b", n) for n in (1, 2, 3, 4)]
    reports = [
        UpdateReport(0.2, 1.0, 0.3, False, (1.0,), (1.0,), 1e-3),
        UpdateReport(0.2, 1.0, 0.5, False, (1.1,), (0.0,), 1e-3),
        UpdateReport(0.5, 4.0, 0.0, False, (0.7, 0.9, 1.1, 0.8), (0.0, 1.62, 0.0, 1.28), 1e-3),
    ]
    parts = [("own", own), ("own", own), ("peers", peers)]
    done = [
        (Update(m, 0.8, part, ("q",)), batch, report)
        for m, ((part, batch), report) in enumerate(zip(parts, reports, strict=True))
    ]
    plan = Plan((("own", 2), ("peers", 1)), (0.8, 0.8, 0.8))
    capability = Capability({("a", ""): 0.25, ("b", ""): 0.5})
    made = learning_metrics(done, plan, capability, ("a", "b"), "a")
    fractions = [made[f"peers/{name}"] for name in ("below_floor", "above_one", "used")]
    assert fractions == [0.25, 0.25, 0.5]
    # weights of the gradient, with alpha 1: 0.9^2 * 2 and 0.8^2 * 2
    effective = 2.9**2 / (1.62**2 + 1.28**2)
    assert made["peers/effective_samples"] == pytest.approx(effective)
    assert made["peers/used/b"] == 0.5
    assert made["peers/effective/b"] == pytest.approx(effective / 4)
    assert (made["own/grad_norm"], made["peers/grad_norm"]) == (1.0, 4.0)
    assert (made["own/clipped_first"], made["own/clipped"]) == (0.0, 0.5)
    assert made["ratio/b"] == pytest.approx(0.875)
    assert (made["loss"], made["grad_norm"]) == (pytest.approx(0.3), 2.0)
    assert made["kl"] == pytest.approx(0.4)  # of updates with own samples: peers have no KL term
    assert (made["capability/b"], made["weight/b"], made["updates"]) == (0.5, 2.0, 3)


def test_means_are_over_the_samples_that_were_not_skipped() -> None:
    """Own: s 1.0 and skipped. Peers: 0.7 (below 0.8, so not used), 0.9 and skipped: half of the two are
    below the floor and half are used; 0.9 alone has weight, worth one sample."""
    blank = Sample("p", 0, "a", True, (1, 2), (0, 1), -0.5, advantage=1.0)
    peer = replace(blank, source="b", is_own=False)
    batch = [
        blank,
        replace(blank, advantage=0.0),
        peer,
        replace(peer, token_ids=(1, 2, 3), loss_mask=(0, 1, 1)),
        replace(peer, advantage=0.0),
    ]
    ratios, weights = (1.0, None, 0.7, 0.9, None), (1.0, None, 0.0, 0.9, None)
    report = UpdateReport(0.1, 0.2, 0.0, False, ratios, weights, 1e-3)
    update = Update(0, 0.8, "mixed", ("p0", "p1"))
    capability = Capability({("a", ""): 0.5, ("b", ""): 0.5})
    plan = Plan((("mixed", 1),), (0.8,))
    found = learning_metrics([(update, batch, report)], plan, capability, ("a", "b"), "a")
    wanted = {
        "pruned/forward": 2,
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
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)

    unseen = replace(report, ratios=(None,) * 5, weights=(None,) * 5)
    found = learning_metrics([(update, batch, unseen)], plan, capability, ("a", "b"), "a")
    assert found["peers/forwarded"] == 0
    for key in ("own/ratio", "peers/used", "peers/below_floor", "ratio/b"):
        assert found[key] is None
