"""Budget rules: what is equal across the arms of a suite, and the steps that follow from it."""

from hacrl.config import Config
from hacrl.errors import UserError

RULES = {
    "rollouts": "each agent draws equally many own rollouts in total, times the arm's factor",
    "updates": "each agent makes equally many parameter updates, times the arm's factor",
}


def is_open(rule: str, config: Config) -> bool:
    """Whether the number of steps does not determine what a run spends: rollouts with dynamic sampling.
    It is then read at its last evaluation within the budget."""
    return rule == "rollouts" and config.problems_per_step > config.prompts_per_step


def match_steps(rule: str, config: Config, reference: Config, ratio: float, where: str) -> int:
    """The number of steps for which every learner of `config` spends `ratio` times what it spends
    under `reference`."""
    if is_open(rule, config) and config.evaluation.every == 0:
        raise UserError(
            f'{where}: budget = "{rule}" needs evaluations during training; set evaluation.every'
        )
    if is_open(rule, reference):
        raise UserError(
            f'{where}: budget = "rollouts" needs a reference with a fixed number of rollouts, not '
            f"algorithm.name = {reference.algorithm.name!r}. Choose another reference"
        )
    mine, theirs = per_step(config, rule), per_step(reference, rule)
    if mine.keys() != theirs.keys():
        raise UserError(f"{where}: the learners differ from those of the reference arm")
    wanted = {agent: ratio * reference.steps * theirs[agent] for agent in mine}
    steps = round(next(wanted[agent] / mine[agent] for agent in mine))
    for agent, count in wanted.items():
        if steps < 1 or abs(steps * mine[agent] - count) > 1e-6 * count:
            raise UserError(
                f'{where}: budget = "{rule}" asks for {count:g} {rule} of {agent!r}, and a step '
                f"makes {mine[agent]}: no number of steps fits every agent. Change steps, "
                "samples_per_prompt or the arm's factor"
            )
    return steps


def per_step(config: Config, rule: str) -> dict[str, int]:
    """Own rollouts or planned updates of every learner in one step."""
    learners = [a for a in config.agents if a.learns]
    if rule == "rollouts":
        return {a.name: config.prompts_per_step * config.samples_of(a) for a in learners}
    from hacrl.algorithms import make_algorithm
    from hacrl.training.plan import plan_of

    algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
    return {a.name: len(plan_of(config, a, algorithm).floors) for a in learners}
