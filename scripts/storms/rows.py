"""Trajectories for tests and storms."""

from dataclasses import replace
from typing import Any

from hacrl.types import Finish, Sampling, Status, Trajectory, Turn, Verdict


def make_row(
    agent: str = "ant",
    problem: str = "q1",
    index: int = 0,
    step: int = 3,
    text: str = "42",
    **fields: Any,
) -> Trajectory:
    """A correct reply; `fields` replaces any fields of the trajectory."""
    made = Trajectory(
        problem_id=problem,
        task="add",
        agent=agent,
        index=index,
        step=step,
        policy_version=step,
        turns=(Turn("assistant", text, True),),
        finish=Finish.STOP,
        mean_logprob=-0.1,
        num_tokens=3,
        verdict=Verdict(1.0, Status.OK, "42"),
        verifier="number/1",
        sampling=Sampling(1.0, 32),
        shareable=True,
    )
    return replace(made, **fields)
