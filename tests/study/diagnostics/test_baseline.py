"""Bias and variance of the baselines, on hand-made snapshots."""

import pytest
from rows import make_row

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.algorithms.capability import Capability, step_rewards
from hacrl.study.diagnostics.baseline import BASELINES, Guess, baseline_metrics, guesses
from hacrl.types import Group, Snapshot, Status, Trajectory, Verdict

Rewards = dict[str, tuple[float, ...]]


def trajectory(agent: str, index: int, reward: float, status: Status = Status.OK) -> Trajectory:
    return make_row(agent, "q", index, 0, task="t", verdict=Verdict(reward, status))


def group(rewards: Rewards, problem: str = "q") -> Group:
    rows = [trajectory(a, i, r) for a in sorted(rewards) for i, r in enumerate(rewards[a])]
    return Group(problem, "t", tuple(rows))


K_J = Capability({("k", ""): 0.25, ("j", ""): 0.5})


def test_the_three_baselines_of_a_group_by_hand() -> None:
    """k right once of 4, j twice of 4, w(k,j) = 0.5: own 1/4, pooled 3/8, capability (1 + 0.5 x 2) / 8.
    Variances of the rewards (ddof 1): 1/4 and 1/3. own 1/4 / 4; pooled (4 x 1/4 + 4 x 1/3) / 64;
    capability (4 x 1/4 + 1/4 x 4 x 1/3) / 64."""
    found = guesses(group({"k": (1, 0, 0, 0), "j": (1, 1, 0, 0)}), K_J, "k")
    assert found["own"].value == 0.25 and found["own"].variance == pytest.approx(1 / 16)
    assert found["pooled"].value == 0.375
    assert found["pooled"].variance == pytest.approx((1 + 4 / 3) / 64)
    assert found["capability"].value == 0.25
    assert found["capability"].variance == pytest.approx((1 + 1 / 3) / 64)


def test_the_capability_baseline_is_the_algorithms() -> None:
    """Wherever the algorithm uses it: the rewards differ and the guard is not needed."""
    hacpo = make_algorithm(make_settings())
    for rewards in ({"k": (1, 0), "j": (1, 1, 0)}, {"k": (0, 0, 0), "j": (1, 0, 0), "i": (1, 1)}):
        made = group(rewards)
        for learner in rewards:
            expected = hacpo.baseline(made, K_J, learner)
            assert guesses(made, K_J, learner)["capability"].value == pytest.approx(expected)


def test_what_was_not_judged_is_in_no_baseline() -> None:
    late = trajectory("k", 1, 0.0, Status.TIMEOUT)
    rows = (trajectory("j", 0, 1.0), trajectory("k", 0, 1.0), late)
    found = guesses(Group("q", "t", rows), K_J, "k")
    assert found["own"] == Guess(1.0, None)  # one reply: its variance is not known
    assert guesses(Group("q", "t", rows[:1]), K_J, "k") == {}


def test_bias_variance_and_spread_by_hand() -> None:
    """Fresh replies: p 1 of 4 (0.25, noise 1/4 / 4), q 2 of 4 (0.5, noise 1/3 / 4). Guesses 0.25 and
    0.75: errors 0 and 0.25, bias 1/8, standard error 0.25 / sqrt(2) / sqrt(2) = 1/8. Squares less
    noise: -1/16 and 1/16 - 1/12, mean -1/24; less the mean variance 1/32: -7/96."""
    values = {"p": Guess(0.25, 0.0), "q": Guess(0.75, 1 / 16), "unseen": Guess(0.0, 1.0)}
    guessed = {p: dict.fromkeys(BASELINES, guess) for p, guess in values.items()}
    found = baseline_metrics(guessed, {"p": (1, 0, 0, 0), "q": (1, 1, 0, 0), "unseen": (1,)})
    assert found["diagnostics/fresh/problems"] == 2
    assert found["diagnostics/fresh/reward"] == pytest.approx(0.375)
    for name in BASELINES:
        assert found[f"diagnostics/bias/{name}"] == pytest.approx(1 / 8)
        assert found[f"diagnostics/bias_se/{name}"] == pytest.approx(1 / 8)
        assert found[f"diagnostics/square_error/{name}"] == pytest.approx(-1 / 24)
        assert found[f"diagnostics/variance/{name}"] == pytest.approx(1 / 32)
        assert found[f"diagnostics/spread_squared/{name}"] == pytest.approx(-7 / 96)


def measured(*problems: Rewards) -> dict[str, float | None]:
    """Rewards that are what their authors score on the mean, and fresh replies just so."""
    groups = {f"p{i}": group(rewards, f"p{i}") for i, rewards in enumerate(problems)}
    capability = Capability(step_rewards(Snapshot(0, ("j", "k"), tuple(groups.values()))))
    fresh = {p: problems[i]["k"] * 50 for i, p in enumerate(groups)}
    return baseline_metrics({p: guesses(g, capability, "k") for p, g in groups.items()}, fresh)


def test_the_theorem_holds_on_the_mean_not_problem_by_problem() -> None:
    """k scores 1/4 and 2/4, j twice that: pooled is too high by (P_j - P_k) / 2 = 0.1875; w = 1/2
    brings j's rewards to k's level on each problem. Then each is strong where the other is weak: 3/4
    and 1/4 against 1/4 and 3/4. P_k = P_j, w = 1: both shared baselines are 1/2, off by -1/4 and +1/4.
    The mean is 0, the mean square 1/16; of it the sampling variance (4 x 1/4 + 4 x 1/4) / 64 = 1/32
    and the noise 200 (1/4 x 3/4) / 199 / 200 of the fresh replies are taken off, though here they
    happen to be 0."""
    found = measured({"k": (1, 0, 0, 0), "j": (1, 1, 0, 0)}, {"k": (1, 1, 0, 0), "j": (1, 1, 1, 1)})
    expected = {"own": 0, "pooled": 0.1875, "capability": 0}
    assert {n: found[f"diagnostics/bias/{n}"] for n in BASELINES} == pytest.approx(expected)
    found = measured({"k": (1, 1, 1, 0), "j": (1, 0, 0, 0)}, {"k": (1, 0, 0, 0), "j": (1, 1, 1, 0)})
    for name in ("pooled", "capability"):
        assert found[f"diagnostics/bias/{name}"] == pytest.approx(0)
        squared = 1 / 16 - 3 / 16 / 199 - 1 / 32
        assert found[f"diagnostics/spread_squared/{name}"] == pytest.approx(squared)
