"""The statistics of quarantine, with numbers by hand, and their false alarms."""

import random
from dataclasses import replace
from math import exp, log

import pytest
from rows import make_row

from hacrl.trust.quarantine import (
    BET,
    CALM_STEPS,
    MAX_RHO,
    STATISTICS,
    THRESHOLD,
    Standing,
    count_copies,
    long_texts,
    rate_evidence,
    ratio_evidence,
)
from hacrl.types import Finish, Snapshot, Trajectory, Turn, make_groups


def test_evidence_by_hand() -> None:
    assert pytest.approx(10.5966, abs=1e-4) == THRESHOLD  # log 40,000
    # One false claim of eleven: log 10 + 10 log(0.9 / 0.99)
    assert rate_evidence(1, 11, "claims") == pytest.approx(2.302585 - 10 * 0.0953102, abs=1e-5)
    assert rate_evidence(0, 0, "claims") == 0
    assert rate_evidence(2, 2, "copies") == pytest.approx(2 * log(10))
    # rho 0, 1, 11 and one above the bound of 100
    assert ratio_evidence([-1000, 0, log(11), 50]) == pytest.approx(
        log(0.9) + 0 + log(2) + log(1 + 0.1 * 99)
    )
    assert ratio_evidence([]) == 0


@pytest.mark.parametrize("statistic", ["claims", "invalid", "copies"])
def test_honest_evidence_has_a_mean_factor_of_one(statistic: str) -> None:
    """E[exp(X)] = 1 at the honest rate, which is what bounds false alarms."""
    honest = {"claims": 0.01, "invalid": 0.01, "copies": 0.05}[statistic]
    mean = honest * exp(rate_evidence(1, 1, statistic)) + (1 - honest) * exp(
        rate_evidence(0, 1, statistic)
    )
    assert mean == pytest.approx(1)


def test_true_log_probabilities_are_no_evidence_and_low_ones_are() -> None:
    """A source with probabilities p over 50 texts, a learner with q: E_p[q / p] = 1. A source that
    claims 1 nat per text less is noticed."""
    rng = random.Random(0)
    p = [rng.random() ** 3 for _ in range(50)]
    q = [rng.random() ** 3 for _ in range(50)]
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    factor = sum(
        a * exp(ratio_evidence([log(b / a)])) for a, b in zip(p, q, strict=True) if a and b
    )
    assert factor <= 1 + 1e-12
    drawn = rng.choices(range(50), p, k=2000)
    honest, lying = ([log(q[i] / p[i]) + shift for i in drawn] for shift in (0.0, 1.0))
    assert ratio_evidence(honest) < 0 < THRESHOLD < ratio_evidence(lying)
    assert pytest.approx(9.9) == BET * (MAX_RHO - 1)


def test_false_alarms_are_rarer_than_promised() -> None:
    """4 statistics at the honest rates, 64 rows a step, promised at most once in 50 steps: in 3,000
    steps there are at most 60 alarms."""
    rng, limit, alarms, standing = random.Random(1), log(len(STATISTICS) * 50), 0, Standing()
    for step in range(3000):
        hits = {
            s: sum(rng.random() < r for _ in range(64))
            for s, r in (("claims", 0.01), ("invalid", 0.01), ("copies", 0.05))
        }
        evidence = {s: rate_evidence(n, 64, s) for s, n in hits.items()}
        evidence["ratio"] = ratio_evidence(
            log(2) if rng.random() < 0.5 else -1000 for _ in range(64)
        )
        standing = standing.after(step, evidence, limit)
        if standing.since is not None:
            alarms, standing = alarms + 1, Standing()
    assert alarms <= 60


def test_a_turncoat_enters_at_once_and_leaves_after_unsuspicious_steps() -> None:
    good = dict.fromkeys(STATISTICS, -1.0)
    bad = {**good, "claims": 6.0}
    standing = Standing()
    for step in range(10):
        standing = standing.after(step, good)
        assert set(standing.scores.values()) == {0.0}  # good steps give no credit
    standing = standing.after(10, bad)
    assert standing.since is None and standing.scores["claims"] == 6
    standing = standing.after(11, bad)
    assert (standing.since, standing.reason, standing.scores["claims"]) == (11, "claims", 12)
    for step in range(12, 30):
        standing = standing.after(step, bad)
    # At most twice the threshold, so the way out is finite: 21.19 - 16 = 5.19 is below half of 10.60.
    assert standing.scores["claims"] == pytest.approx(2 * THRESHOLD)
    for step in range(30, 30 + 15 + CALM_STEPS - 1):
        standing = standing.after(step, good)
        assert standing.since == 11
    assert standing.calm == CALM_STEPS - 1
    assert standing.after(99, {"ratio": 6.0}).calm == 0
    assert standing.after(99, good) == Standing()


def row(agent: str, index: int, text: str, problem: str = "q") -> Trajectory:
    return make_row(agent, problem, index, 0, text)


def snapshot(*rows: Trajectory) -> Snapshot:
    return Snapshot(0, ("me", "ant", "bee"), make_groups(rows))


def test_copies_are_long_texts_of_others_on_the_same_problem() -> None:
    long, other, short = "é" * 100, "x" * 200, "y" * 199  # 200, 200 and 199 bytes
    before = long_texts(snapshot(row("bee", 0, long), row("ant", 1, other), row("bee", 2, short)))
    assert len(before) == 2
    now = [row("ant", 0, long), row("ant", 1, other), row("ant", 2, short)]
    now.append(row("ant", 3, long, "p"))
    assert count_copies(snapshot(*now), "me", [before]) == ({"ant": 3}, {"ant": 1})
    # In the same step nobody knows who copied whom, but the learner knows its own texts.
    same = [row("me", 0, long), row("ant", 0, long), row("ant", 1, other), row("bee", 0, other)]
    assert count_copies(snapshot(*same), "me", []) == ({"ant": 2, "bee": 1}, {"ant": 1, "bee": 0})
    begun = [Turn("assistant", long[:60], False), Turn("assistant", long[60:], True)]
    begun_by = [replace(now[0], turns=tuple(begun))]  # in reply_start the copy is one, too
    assert count_copies(snapshot(*begun_by), "me", [before]) == ({"ant": 1}, {"ant": 1})
    both = [
        Turn("assistant", "s" * 300, False),
        Turn("assistant", "4", True),
    ]  # the learner's start
    honest = [replace(row(agent, 0, ""), turns=tuple(both)) for agent in ("me", "ant")]
    assert count_copies(snapshot(*honest), "me", []) == ({}, {})
    withheld = replace(now[0], turns=(), finish=Finish.WITHHELD)
    assert count_copies(snapshot(withheld), "me", [before]) == ({}, {})
