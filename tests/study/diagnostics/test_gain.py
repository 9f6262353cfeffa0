"""The gain on unseen problems: against a finite difference, and which problems it takes."""

from pathlib import Path

import pytest
import torch

from hacrl.config import AgentConfig
from hacrl.policy.policy import Policy
from hacrl.study.diagnostics.gain import UnseenProblems, gain_metrics, leave_one_out, problem_gains
from hacrl.study.diagnostics.gradients import Directions
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.tasks.dataset import DatasetTask
from hacrl.types import Completion, Finish, Message, Problem, Rollout, Status, Verdict

REPLIES = {"p": ((70, 71, 72), (80, 81)), "q": ((90,), (75, 76), (77, 78, 79))}
REWARDS = {"p": (1.0, 0.0), "q": (0.0, 1.0, 0.5)}


def rollouts(p: Policy) -> list[Rollout]:
    return [
        Rollout(
            problem,
            i,
            0,
            p.renderer.prompt([Message("user", problem)]),
            Completion("", ids, (0.0,) * len(ids), Finish.STOP),
            Verdict(REWARDS[problem][i], Status.OK),
        )
        for problem, replies in REPLIES.items()
        for i, ids in enumerate(replies)
    ]


def test_gain_is_the_slope_along_the_displacement(llama: Path) -> None:
    """On problem p the replies have advantages 1 and -1, on q -0.75, 0.75 and 0. So with L(y) the
    log-probability of a whole reply, p gives U (L1' - L2') / 2 and q U (-0.75 L1' + 0.75 L2') / 3,
    the slopes along d taken from scores a small way to both sides."""
    p = Policy(AgentConfig(name="a", model=str(llama)), device="cpu", temperature=1.0, beta=0.0)
    draw = torch.Generator().manual_seed(0)
    move = {n: 1e-3 * torch.randn(m.shape, generator=draw) for n, m in p.master.items()}
    # the embedding of the padding token, here also the end token, has no gradient by its making
    move["model.embed_tokens.weight"][p.renderer.pad_id] = 0.0
    made = problem_gains(p, rollouts(p), Directions({}, {"b": move}, {"b": 3}), "a")

    def sums(way: float) -> list[float]:
        with torch.no_grad():
            for n, m in p.master.items():
                m += way * move[n]
        found = p.score([(r.prompt_ids, r.completion.token_ids) for r in rollouts(p)])
        with torch.no_grad():
            for n, m in p.master.items():
                m -= way * move[n]
        return [sum(tokens) for tokens in found]

    slopes = [(b - a) / 0.2 for a, b in zip(sums(-0.1), sums(0.1), strict=True)]
    assert made["b"][0] == pytest.approx(3 * (slopes[0] - slopes[1]) / 2, rel=0.02)
    assert made["b"][1] == pytest.approx(3 * 0.75 * (slopes[3] - slopes[2]) / 3, rel=0.02)
    assert all(abs(v) > 1e-4 for v in made["b"])


def test_mean_and_error_by_hand() -> None:
    """0.1 and 0.3: mean 0.2, deviation 0.1 sqrt(2), error 0.1. One problem has no error."""
    assert leave_one_out([0.0, 1.0, 0.5]) == [-0.75, 0.75, 0.0]
    made = gain_metrics({"b": [0.1, 0.3], "c": [0.5], "d": []})
    assert made["diagnostics/gain/b"] == pytest.approx(0.2)
    assert made["diagnostics/gain_se/b"] == pytest.approx(0.1)
    assert made["diagnostics/gain/c"] == 0.5 and made["diagnostics/gain_se/c"] is None
    assert "diagnostics/gain/d" not in made


# ---------------------------------------------------------------- which problems


def ids(problems: list[Problem]) -> set[str]:
    return {p.id for p in problems}


def test_held_out_problems_apart_from_the_evaluated_ones() -> None:
    """483 held-out problems, 300 evaluated: 183 are left, others at every check, the same whenever
    asked."""
    task = ArithmeticTask(seed=0)
    unseen = UnseenProblems(task, 0, 32, evaluated=300)
    assert len(unseen.spare) == 183
    first, held_out = unseen.at(0, 16)
    assert held_out and len(ids(first)) == 16
    assert not ids(first) & ids(task.held_out(300))
    assert ids(first) != ids(unseen.at(6, 16)[0])
    assert ids(first) == ids(UnseenProblems(task, 0, 32, evaluated=300).at(0, 16)[0])


def plain_task(train: int, held_out: int) -> DatasetTask:
    def problems(kind: str, count: int) -> list[Problem]:
        return [Problem(f"{kind}{i}", (Message("user", "?"),), "1", "t") for i in range(count)]

    return DatasetTask("t", problems("train", train), problems("held", held_out), 0)


def test_coming_training_problems_if_no_held_out_ones_are_left() -> None:
    """20 problems, 4 a step: after steps 0 and 1 there are 12 that no update has used."""
    task = plain_task(20, 10)
    unseen = UnseenProblems(task, 0, 4, evaluated=10)
    seen = ids(task.batch(0, 4)) | ids(task.batch(1, 4))
    found, held_out = unseen.at(1, 6)
    assert not held_out and len(ids(found)) == 6
    assert not ids(found) & seen
    assert len(unseen.at(1, 16)[0]) == 12  # fewer than asked for
    assert unseen.at(4, 6)[0] == []  # all have been used
    found, held_out = UnseenProblems(plain_task(20, 0), 0, 4, evaluated=0).at(0, 4)
    assert not held_out and len(found) == 4
