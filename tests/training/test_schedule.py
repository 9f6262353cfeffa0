"""Learning-rate schedules: the values of transformers, the same after a resume."""

from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
from team import member, rows, team

import hacrl
from hacrl.config_agent import AgentConfig
from hacrl.errors import UserError
from hacrl.training.schedule import make_schedule

COSINE = [0.5 * (1 + cos(pi * i / 4)) for i in range(5)]


def factors(total: int, *updates: int, **settings: Any) -> list[float]:
    agent = AgentConfig(name="a", model="m", learning_rate=1e-3, **settings)
    return [make_schedule(agent, total, 1)(update) for update in updates]


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0, 0]),
        # 1 in the warm-up, which the policy applies; then (4 - update) / (4 - 2)
        ({"schedule": "linear", "warmup_updates": 2}, [1, 1, 1, 0.5, 0, 0]),
        # a short trial ends in the warm-up
        ({"schedule": "cosine", "warmup_updates": 9}, [1, 1, 1, 1, 1, 1]),
        ({"schedule": "cosine"}, [*COSINE, 0]),  # stays at its end
        (
            {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": 0.1}},
            [0.1 + 0.9 * value for value in [*COSINE, 0]],
        ),
        ({"schedule": "inverse_sqrt", "warmup_updates": 1}, [1, 1, 2**-0.5, 3**-0.5, 0.5, 0.5]),
    ],
)
def test_the_factor_of_every_update(settings: dict[str, Any], values: list[float]) -> None:
    assert factors(4, *range(6), **settings) == pytest.approx(values, abs=1e-12)


def test_wrong_options_are_named() -> None:
    with pytest.raises(UserError, match=r"agent 'a': schedule_options = \{'rate': 2\} .*'linear'"):
        factors(4, 0, schedule="linear", schedule_options={"rate": 2})
    with pytest.raises(
        UserError, match=r"warmup_updates = 5 is more than the 4 updates of schedule_steps = 4"
    ):
        factors(9, 0, schedule="inverse_sqrt", schedule_steps=4, warmup_updates=5)
    with pytest.raises(ValueError, match="no meaning with schedule = 'constant'"):
        AgentConfig(name="a", model="m", schedule_steps=3)


def test_a_resumed_run_has_the_rates_and_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    """Two updates a step: 2e-4 * (1 - i / 8) at update i; metrics have the last of a step."""
    quick = {"evaluation": {"problems": 0}}
    config = team(member("wren", schedule="linear"), steps=4, **quick)
    whole = hacrl.train(config, tmp_path / "whole")
    rates = [row["learning_rate"] for row in rows(whole, "wren")]
    assert rates == pytest.approx([2e-4 * (1 - i / 8) for i in (1, 3, 5, 7)])

    agent = member("wren", schedule="linear", schedule_steps=4)
    part = hacrl.train(team(agent, steps=2, **quick), tmp_path / "part")
    hacrl.resume(part.path, steps=4)
    assert part.metric_rows() == whole.metric_rows()
    model = "step-000004/model.safetensors"
    assert (part.checkpoints("wren") / model).read_bytes() == (
        whole.checkpoints("wren") / model
    ).read_bytes()
    with pytest.raises(UserError, match=r"agents\.wren\.schedule_steps: 4 -> 5"):
        hacrl.resume(whole.path, steps=5)
