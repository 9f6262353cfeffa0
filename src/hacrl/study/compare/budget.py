"""Budgets made equal by a named rule.

rollouts  each agent draws as many rollouts of its own in all as under the reference arm (times the
          arm's factor): the number of steps follows
updates   each agent makes as many parameter updates: the number of steps follows
time      steps stay as configured; what is read is the last evaluation within the training seconds
          that the reference took with the same team and seed
"""

from __future__ import annotations

from hacrl.config import Config
from hacrl.errors import UserError

RULES = {
    "rollouts": "each agent's own rollouts in all are equal, up to the arm's declared factor",
    "updates": "each agent's parameter updates are equal, up to the arm's declared factor",
    "time": "each arm is read at its last evaluation within the training seconds of the reference "
    "(same team, same seed)",
}


def match_steps(rule: str, config: Config, reference: Config, ratio: float, where: str) -> int:
    """Steps of `config` that spend `ratio` times what `reference` spends, for every learner."""
    if rule == "time":
        if config.evaluation.every == 0:
            raise UserError(
                f'{where}: budget = "time" reads evaluations on the way; set evaluation.every'
            )
        return config.steps
    mine, theirs = per_step(config, rule), per_step(reference, rule)
    if mine.keys() != theirs.keys():
        raise UserError(f"{where}: its learners are not those of the reference arm")
    wanted = {agent: ratio * reference.steps * theirs[agent] for agent in mine}
    steps = {agent: round(wanted[agent] / mine[agent]) for agent in mine}
    first = next(iter(steps.values()))
    for agent, count in wanted.items():
        if first < 1 or abs(first * mine[agent] - count) > 1e-6 * count:
            raise UserError(
                f'{where}: budget = "{rule}" asks for {count:g} {rule} of {agent!r}, and a step '
                f"makes {mine[agent]}: no number of steps gives that to every agent. Change steps, "
                "samples_per_prompt or the arm's factor"
            )
    return first


def per_step(config: Config, rule: str) -> dict[str, int]:
    """What every learner spends in a step: own rollouts, or updates as planned."""
    learners = [a for a in config.agents if a.learns]
    if rule == "rollouts":
        return {a.name: config.prompts_per_step * config.samples_of(a) for a in learners}
    from hacrl.algorithms import make_algorithm  # torch

    algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
    plans = {a.name: config.plan_of(a, algorithm) for a in learners}
    return {name: len(plan.floors) for name, plan in plans.items()}
