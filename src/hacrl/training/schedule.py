"""Learning-rate schedules: those of transformers, as a factor of `agents.*.learning_rate`.

The factor depends on the number of planned updates before this one alone. A resumed run needs no state
for it and makes the same updates.
"""

from collections.abc import Callable

import torch

from hacrl.config_agent import AgentConfig
from hacrl.errors import UserError, first_line


def make_schedule(agent: AgentConfig, steps: int, updates_per_step: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by the number of planned updates before an update.

    It is 1 during the warm-up, which the policy applies. After it the factor is that of
    `transformers.get_scheduler` at the same number; after the last planned update it stays.
    """
    if agent.schedule == "constant":
        return lambda update: 1.0
    total = (agent.schedule_steps or steps) * updates_per_step
    if agent.schedule_steps and 0 < total < agent.warmup_updates:
        raise UserError(
            f"agent {agent.name!r}: warmup_updates = {agent.warmup_updates} is more than the {total} "
            f"updates of schedule_steps = {agent.schedule_steps}: lower it, or raise schedule_steps"
        )
    from transformers import get_scheduler

    try:
        scheduler = get_scheduler(
            agent.schedule,
            torch.optim.SGD([torch.zeros(1)], lr=agent.learning_rate),
            num_warmup_steps=agent.warmup_updates,
            num_training_steps=total,
            scheduler_specific_kwargs=agent.schedule_options,
        )
        (factor,) = scheduler.lr_lambdas
        factor(total)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"agent {agent.name!r}: schedule_options = {agent.schedule_options} do not fit schedule = "
            f"{agent.schedule!r} over {total} updates: {first_line(error)}"
        ) from error
    return lambda update: (
        1.0 if update < agent.warmup_updates else float(factor(min(update, total)))
    )
